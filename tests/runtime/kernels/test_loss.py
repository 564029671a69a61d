"""The loss over vocab, chunk by chunk, against torch's own; and what its product with the table costs in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from platform.model import build_model
from platform.plan import operation_plan as chunks
from platform.plan.layout import Mesh
from platform.plan.operation_plan import computes_gradients_in_forward, loss_chunk_rows
from platform.predict.footprint import count_saved_elements
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_peak_bytes
from platform.runtime import chunked_loss
from platform.runtime.chunked_loss import Likelihood, LossClasses, Targets
from tests.harness.live import count
from tests.harness.oracle import configure, prove, run
from tests.harness.threads import run_threads

ROWS, VOCAB = 37, 50


def drawn(dtype=torch.float64, columns: int = VOCAB) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(-1, VOCAB, (ROWS,), generator=draw)
    labels[3] = -1
    return (3 * torch.randn(ROWS, columns, generator=draw, dtype=torch.float64)).to(dtype), labels


def expected(logits, labels, smoothing: float, cap: float = 0.0):
    """Loss and gradient by torch, in fp64, of the columns that are no padding."""
    whole = logits[:, :VOCAB].double().detach().requires_grad_()
    bent = cap * torch.tanh(whole / cap) if cap else whole
    value = F.cross_entropy(bent, labels, ignore_index=-1, reduction="sum", label_smoothing=smoothing)
    value.backward()
    return value.detach(), F.pad(whole.grad, (0, logits.shape[1] - VOCAB))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "_ELEMENTS", 4 * VOCAB)


@pytest.mark.parametrize(("smoothing", "cap"), [(0.0, 0.0), (0.1, 0.0), (0.1, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_split_vocab(smoothing, cap, dtype, small_chunks):
    """Over 4 ranks of 16 columns each, of which the last has 2 that are real; and over 5, where one has none."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for ranks in (1, 4, 5):
        logits, labels = drawn(dtype, 16 * max(ranks, 4))

        def work(communicator, logits=logits, labels=labels, ranks=ranks):
            over = ("t",) if ranks > 1 else ()
            mine = logits.chunk(ranks, 1)[communicator.rank].clone().requires_grad_()
            first = communicator.rank * mine.shape[1]
            value = chunked_loss.cross_entropy(
                mine, Targets(labels), communicator, LossClasses(over, first, VOCAB, smoothing, cap=cap)
            )
            (2 * value).backward()
            return value.detach(), mine.grad

        results = run_threads(Mesh.arrange_axes({"t": ranks}), work) if ranks > 1 else [work(_alone())]
        value, gradient = expected(logits, labels, smoothing, cap)
        assert all(abs(v - value) <= tolerance * value for v, _ in results)
        assert (torch.cat([g for _, g in results], 1) - 2 * gradient).abs().max() <= 2 * tolerance


OWN = {
    "focal": lambda of: -((1 - of.log_probability.exp()) ** 2) * of.log_probability,
    "z": lambda of: 0.01 * of.log_sum_exp**2 - of.log_probability,
    "smoothed": lambda of: -0.9 * of.log_probability - 0.1 * of.mean_log_probability,
    "unlikelihood": lambda of: -torch.log1p(-0.99 * of.log_probability.exp()),
}


def whole_loss(name: str, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """The same by autograd of unsplit logits."""
    logs, counts = logits.log_softmax(1), labels >= 0
    label = logs.gather(1, labels.clamp(0).unsqueeze(1)).squeeze(1)
    losses = OWN[name](Likelihood(label, logits.logsumexp(1), logs.mean(1)))
    return ((losses if weights is None else losses * weights) * counts).sum()


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_of_ones_own(name, weighted, small_chunks):
    """As above: alone, over 4 ranks of which one has 2 real columns, over 5 of which one has none; and as labels that
    are smoothed."""
    logits, labels = drawn(columns=80)
    weights = torch.linspace(-1, 2, ROWS, dtype=torch.float64) if weighted else None
    whole = logits[:, :VOCAB].clone().requires_grad_()
    expect = whole_loss(name, whole, labels, weights)
    expect.backward()
    for ranks in (1, 4, 5):

        def work(communicator, ranks=ranks):
            mine = logits[:, : 16 * max(ranks, 4)].chunk(ranks, 1)[communicator.rank].clone().requires_grad_()
            over, first = ("t",) if ranks > 1 else (), communicator.rank * mine.shape[1]
            classes = LossClasses(over, first, VOCAB, loss=OWN[name])
            value = chunked_loss.cross_entropy(mine, Targets(labels, weights), communicator, classes)
            (2 * value).backward()
            return value.detach(), mine.grad

        results = run_threads(Mesh.arrange_axes({"t": ranks}), work) if ranks > 1 else [work(_alone())]
        assert all(abs(value - expect) <= 1e-12 * abs(expect) for value, _ in results)
        gradient = torch.cat([g for _, g in results], 1)
        assert (gradient[:, :VOCAB] - 2 * whole.grad).abs().max() <= 1e-13
        assert not gradient[:, VOCAB:].any()
    if name == "smoothed" and not weighted:
        value, _ = expected(logits, labels, 0.1)
        assert abs(value - expect) <= 1e-12 * value


def _alone():
    from platform.runtime.communicator import SingleRank

    return SingleRank(Mesh.arrange_axes({}))


LARGE = {"d_model": 16, "heads": 4, "layers": 1, "length": 32, "global_batch": 16, "microbatch": 8}


@pytest.mark.parametrize(
    ("tied", "more"),
    [(True, {}), (False, {"label_smoothing": 0.1}), (True, {"data": 2}), (True, {"kind": "encoder"})],
    ids=str,
)
def test_gradients_at_once_equal_those_kept(tied, more, small_chunks, monkeypatch):
    """The oracle's batch is one of small chunks too; the models of its matrix keep the gradient of the logits."""
    c = configure(**{**LARGE, "vocab": 61, "tied": tied, **more})
    plan = make_plan(c)
    calls = []
    at_once = chunked_loss._compute_loss_by_chunks
    monkeypatch.setattr(
        chunked_loss, "_compute_loss_by_chunks", lambda *arguments: calls.append(arguments[-1]) or at_once(*arguments)
    )
    prove(c)
    assert calls and all(g is not None for g in calls)
    assert computes_gradients_in_forward(
        plan.operations[_product(tied)], plan.operations["cross_entropy", "loss"], 256, 61, 16, True
    )


def _product(tied: bool) -> tuple[str, str]:
    return "project", "embedding" if tied else "head"


def test_a_wrong_chunk_shows(small_chunks, monkeypatch):
    """Negative control: a table's gradient without the first chunk's."""
    right = chunked_loss._compute_loss_by_chunks

    def wrong(x, table, bias, targets, communicator, classes, gradients):
        value = right(x, table, bias, targets, communicator, classes, gradients)
        later = targets[slice(8, None)]
        right(x[8:], table, bias, later, communicator, classes, (gradients[0][8:].clone(), *gradients[1:]))
        return value

    monkeypatch.setattr(chunked_loss, "_compute_loss_by_chunks", wrong)
    c = configure(**LARGE, vocab=61, data=2)
    with pytest.raises(AssertionError, match="gradient of"):
        prove(c)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_logits_in_the_type_of_statistics(precision):
    """Nothing of a step is as large as the logits in fp32, though four of them would be without chunks; and what the
    plan says is needed is held."""
    c = configure(
        layers=1, d_model=32, heads=4, length=256, vocab=4096, microbatch=8, global_batch=8, precision=precision
    )
    plan = make_plan(c)
    rows = 256 * 8
    assert loss_chunk_rows(rows, 4096) == rows // 8
    (rank,) = count(c, plan)
    assert rank.largest < rows * 4096 * 4
    assert abs(predict_peak_bytes(c, plan) - rank.peak) <= 0.05 * rank.peak
    if precision == "fp32":
        assert rank.largest == 4 * max(rows // 8 * 4096, 4096 * 32)
        assert count_saved_elements(plan, build_model(c.model)).total_elements < rows * 4096


def test_a_large_vocab_is_aligned():
    """Per rank that splits it; padded otherwise on one worker (1152) than on two (1030), and the same numbers."""

    def padded(vocab: int, **more) -> int:
        return make_plan(configure(vocab=vocab, **more)).planner.sizes["vocab"]

    split = {"tensor": "1d", "axes": {"t": 2}}
    assert (padded(1023), padded(1024), padded(1030), padded(50257)) == (1023, 1024, 1152, 50304)
    assert (padded(2047, **split), padded(2048, **split), padded(2049, **split)) == (2048, 2048, 2304)
    plan, _ = prove(configure(**split, vocab=1030, layers=1))
    assert plan.planner.sizes["vocab"] == 1030


def direction(c) -> torch.Tensor:
    """The whole gradient of the first step as a vector of length 1, whatever the loss's scale."""
    gradients = run(c)[1][0].gradients
    vector = torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])
    return vector / vector.norm()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_many_logits_are_not_kept_in_16_bits_either(precision, small_chunks, monkeypatch):
    """Of gradients that add up in fp32, chunk by chunk, no digit is lost to those of kept logits."""
    wanted = direction(configure(**LARGE, vocab=61))
    errors, calls = [], []
    by_chunks = chunked_loss._compute_loss_by_chunks
    monkeypatch.setattr(
        chunked_loss,
        "_compute_loss_by_chunks",
        lambda *arguments: calls.append(arguments[-1][1].dtype) or by_chunks(*arguments),
    )
    for kept in (2**31, 1):
        monkeypatch.setattr(chunks, "_KEPT", kept)
        errors.append((direction(configure(**LARGE, vocab=61, precision=precision)) - wanted).norm())
        assert bool(calls) == (kept == 1)
    assert set(calls) == {torch.float32} and errors[1] <= 1.1 * errors[0]


def test_many_logits_in_16_bits_need_what_is_planned(monkeypatch):
    c = configure(layers=1, d_model=32, heads=4, length=256, vocab=4096, microbatch=8, global_batch=8, precision="bf16")
    kept = predict_peak_bytes(c, make_plan(c))
    monkeypatch.setattr(chunks, "_KEPT", 1)
    plan = make_plan(c)
    (rank,) = count(c, plan)
    assert abs(predict_peak_bytes(c, plan) - rank.peak) <= 0.05 * rank.peak and predict_peak_bytes(c, plan) < kept


def test_a_chunk_of_many_tokens_has_a_bound():
    assert loss_chunk_rows(10**6, 2**17) == 2**28 // 2**17 and loss_chunk_rows(8, 2**40) == 1
