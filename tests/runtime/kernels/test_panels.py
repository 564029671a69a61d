"""Attention in panels, gathered or around a ring of threads, against one softmax over all scores in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np
import pytest
import torch

from platform.plan.layout import DIAGONAL, MASKED, WHOLE, Mesh, Pair, Stretch, pair_queries_with_keys
from platform.runtime import attention_pairs, panels
from platform.runtime.communicator import SingleRank
from platform.runtime.panels import Hiding, PanelAttention, attend_panels
from platform.runtime.residual import Drawing, drop_elements, random_counters
from tests.harness.threads import run_threads

LENGTH, BATCH, HEADS, SCALE, RATE = 24, 2, 4, 0.3, 0.25


@dataclass(frozen=True)
class Case:
    kernel: str = "flash"
    causal: bool = True
    window: int = 0
    documents: bool = False
    padding: bool = False
    kv_heads: int = 2
    d_value: int = 8
    sink: bool = False
    bias: bool = False
    bias_rows: int = 1
    dropout: bool = False
    block: int = 5
    factor: float = 1.0
    cap: float = 0.0


CASES = {
    "causal": Case(),
    "math": Case("math"),
    "every key": Case(causal=False),
    "window": Case(window=7),
    "a window of one": Case(window=1, kernel="math"),
    "documents": Case(documents=True),
    "documents, window, math": Case("math", documents=True, window=4),
    "padding": Case(causal=False, padding=True),
    "causal, padding": Case(padding=True, block=24),
    "wide values, every head": Case("math", kv_heads=4, d_value=12),
    "one head of keys": Case(kv_heads=1),
    "sink": Case(sink=True),
    "sink, window": Case(sink=True, window=6, block=1024),
    "bias": Case(bias=True, causal=False),
    "dropout": Case(dropout=True),
    "large scores": Case(factor=20.0),
    "cap": Case(cap=0.7),
    "cap, bias": Case(cap=0.7, bias=True, kv_heads=1),
    "cap, a bias of each sequence": Case(cap=0.7, bias=True, bias_rows=BATCH),
    "cap, sink, window, documents": Case(cap=0.7, sink=True, window=4, documents=True),
}


def tensors(c: Case) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    make = partial(torch.randn, generator=g, dtype=torch.float64)
    return {
        "q": make(BATCH, HEADS, LENGTH, 8) * c.factor,
        "k": make(BATCH, c.kv_heads, LENGTH, 8) * c.factor,
        "v": make(BATCH, c.kv_heads, LENGTH, c.d_value),
        **({"sink": make(HEADS)} if c.sink else {}),
        **({"bias": make(c.bias_rows, HEADS, LENGTH, LENGTH)} if c.bias else {}),
    }


BEGINS = torch.tensor([[0] * 9 + [9] * 15, [0] * 4 + [4] * 9 + [13] * 11]).t()  # [length, batch]
PADDING = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
PADDING[0, 17:] = PADDING[1, :3] = True  # so that some queries of the second sequence see nothing if it is causal
OUT = torch.randn(BATCH, HEADS, LENGTH, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def drawing() -> Drawing:
    shape = BATCH, HEADS, LENGTH, LENGTH
    strides = [HEADS * LENGTH**2, LENGTH**2, LENGTH, 1]
    return Drawing(random_counters([torch.arange(n) for n in shape], strides), torch.tensor(12345), RATE)


def one_softmax(c: Case) -> dict[str, torch.Tensor]:
    """Result and gradients of the whole attention."""
    x = {name: t.requires_grad_() for name, t in tensors(c).items()}
    repeat = HEADS // c.kv_heads
    s = SCALE * x["q"] @ x["k"].repeat_interleave(repeat, 1).mT
    s = (c.cap * torch.tanh(s / c.cap) if c.cap else s) + x.get("bias", 0)
    at = torch.arange(LENGTH)
    behind = at[:, None] - at
    hidden = torch.zeros_like(s, dtype=torch.bool)
    hidden |= (behind < 0) if c.causal else hidden
    hidden |= (behind >= c.window) if c.window else hidden
    hidden |= (at < BEGINS.t()[:, None, :, None]) if c.documents else hidden
    hidden |= PADDING[:, None, None] if c.padding else hidden
    s = s.masked_fill(hidden, -inf)
    if c.sink:
        s = torch.cat((s, x["sink"][:, None, None].expand(*s.shape[:3], 1)), -1)
    p = s.masked_fill(hidden.all(-1, keepdim=True) & (not c.sink), 0).softmax(-1)[..., :LENGTH].masked_fill(hidden, 0)
    if c.dropout:
        p = drop_elements(p, *drawing())
    return gradients(p @ x["v"].repeat_interleave(repeat, 1), x)


def gradients(out: torch.Tensor, x: dict[str, torch.Tensor], rows: torch.Tensor | None = None):
    weights = OUT[..., : out.shape[-1]]
    (out * (weights if rows is None else weights[:, :, rows])).sum().backward()
    return {"out": out.detach(), **{name: t.grad for name, t in x.items()}}


def contiguous(n: int) -> list[list[Stretch]]:
    return [[Stretch(i * LENGTH // n, LENGTH // n)] for i in range(n)]


def zigzag(n: int) -> list[list[Stretch]]:
    """The i-th rank has the i-th piece from the front and the i-th from the back."""
    size = LENGTH // n // 2
    return [[Stretch(i * size, size), Stretch((2 * n - 1 - i) * size, size)] for i in range(n)]


def rows_of(stretches) -> torch.Tensor:
    return torch.cat([torch.arange(s.first, s.end) for s in stretches])


def on_a_rank(c: Case, queries, keys, over, communicator, moved=None):
    """Result and gradients of a rank's queries, with the keys that it has."""
    me = communicator.rank
    mine, theirs = rows_of(queries[me]), rows_of(keys[me if over else 0])
    whole = tensors(c)
    x = {n: whole[n][:, :, mine if n == "q" else theirs] for n in ("q", "k", "v")}
    x |= {"sink": whole["sink"]} if c.sink else {}
    x |= {"bias": whole["bias"][:, :, mine]} if c.bias else {}
    x = {name: t.clone().requires_grad_() for name, t in x.items()}
    draw = drawing() if c.dropout else None
    if draw:
        b, h, length, memory = draw.counters
        draw = draw._replace(counters=(b, h, length[:, :, mine], memory))
    hiding = Hiding(BEGINS[mine] if c.documents else None, PADDING if c.padding else None, draw)
    plan = PanelAttention(queries[me], keys, over, c.kernel, SCALE, c.causal, c.window, c.cap)
    out = attend_panels(communicator, plan, (x["q"], x["k"], x["v"]), hiding, x.get("sink"), x.get("bias"))
    return {"rows": mine, "keys": theirs, **gradients(out, x, mine)}, communicator.moved


def differences(expected, results, over) -> dict[str, float]:
    """The largest difference from one softmax, of each tensor, beside its largest number, of ranks' parts together."""
    totals = {name: torch.zeros_like(x) for name, x in expected.items()}
    for parts, _ in results:
        for name in expected:
            if name in ("k", "v"):
                totals[name][:, :, parts["keys"]] += parts[name]
            elif name == "sink":
                totals[name] += parts[name]
            else:
                totals[name][:, :, parts["rows"]] = parts[name]
    return {name: ((totals[name] - x).abs().max() / max(1, x.abs().max())).item() for name, x in expected.items()}


def compared(c: Case, n: int, pieces, ring: bool) -> dict[str, float]:
    keys = pieces(n) if ring else [[Stretch(0, LENGTH)]]
    mesh = Mesh.arrange_axes({"context": n})
    over = ("context",) if ring else ()
    results = run_threads(mesh, partial(on_a_rank, c, pieces(n), keys, over))
    size = 2 * BATCH * c.kv_heads * LENGTH * (8 + c.d_value) // 2 * 8  # bytes of all keys and values
    moved = sum(m["rotate/context"] for _, m in results)
    assert moved == (3 * (n - 1) * size if ring else 0)
    return differences(one_softmax(c), results, over)


@pytest.mark.parametrize("name", CASES)
def test_a_ring_equals_one_softmax(name, monkeypatch):
    monkeypatch.setattr(panels, "BLOCK", CASES[name].block)
    for n, pieces in ((2, contiguous), (3, zigzag), (4, contiguous)):
        errors = compared(CASES[name], n, pieces, ring=True)
        assert max(errors.values()) < 1e-12, (n, errors)


@pytest.mark.parametrize("name", CASES)
def test_gathered_keys_equal_one_softmax(name, monkeypatch):
    monkeypatch.setattr(panels, "BLOCK", CASES[name].block)
    for n, pieces in ((2, zigzag), (3, contiguous)):
        errors = compared(CASES[name], n, pieces, ring=False)
        assert max(errors.values()) < 1e-12, (n, errors)


@pytest.mark.parametrize("name", ["causal", "sink", "causal, padding", "one head of keys"])
def test_diagonals_in_parts_equal_one_softmax(name, monkeypatch):
    """As a kernel does that computes scores which it then hides; the rows of a part have others before and behind."""
    kernel = attention_pairs.FUSED["cpu", "flash"]
    monkeypatch.setitem(attention_pairs.FUSED, ("cpu", "flash"), kernel._replace(halves=range(3, LENGTH + 1)))
    for n, pieces, ring in ((2, zigzag, False), (1, contiguous, False), (3, zigzag, True)):
        errors = compared(CASES[name], n, pieces, ring)
        assert max(errors.values()) < 1e-12, (n, ring, errors)


def packed(kind: str, sequences: int) -> torch.Tensor:
    """Where the documents of each token begin, int64 [length, sequences]."""
    draw = np.random.default_rng(5)
    begins = []
    for i in range(sequences):
        borders = {
            "drawn": draw.choice(LENGTH, 4, replace=False),
            "at the borders of blocks": [[12], [6, 18], [4, 8, 16], [3, 6, 9, 12]][i % 4],
            "of one token": range(LENGTH) if i % 2 == 0 else [11, 12, 13],
            "alike": [9, 10],
            "one document": [],
        }[kind]
        first = np.isin(np.arange(LENGTH), borders)
        begins.append(np.maximum.accumulate(np.where(first, np.arange(LENGTH), 0)))
    return torch.from_numpy(np.stack(begins, 1))


def with_documents(monkeypatch, kind: str, short: int, sequences: int = 3) -> None:
    monkeypatch.setitem(globals(), "BATCH", sequences)
    monkeypatch.setitem(globals(), "BEGINS", packed(kind, sequences))
    draw = torch.Generator().manual_seed(2)
    monkeypatch.setitem(globals(), "OUT", torch.randn(sequences, HEADS, LENGTH, 16, generator=draw).double())
    monkeypatch.setattr(panels, "mask_sharing_limit", lambda device: short)


DOCUMENTS = ["drawn", "at the borders of blocks", "of one token", "alike", "one document"]


@pytest.mark.parametrize("short", [1, 4, 24])
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_what_documents_hide_is_left_out(kind, short, monkeypatch):
    """Whatever the documents are, alone or with others in a mask, in pieces on several ranks and in windows."""
    with_documents(monkeypatch, kind, short)
    kernel = attention_pairs.FUSED["cpu", "flash"]
    monkeypatch.setitem(attention_pairs.FUSED, ("cpu", "flash"), kernel._replace(halves=range(5, 9)))
    monkeypatch.setattr(panels, "BLOCK", 5)
    for n, pieces, ring in ((2, zigzag, True), (2, zigzag, False), (3, contiguous, True), (1, contiguous, False)):
        for case in ("documents", "documents, window, math"):
            errors = compared(CASES[case], n, pieces, ring)
            assert max(errors.values()) < 1e-12, (case, n, ring, errors)
    dropped = Case(documents=True, dropout=True, sink=True)
    errors = compared(dropped, 2, zigzag, True)
    assert max(errors.values()) < 1e-12, errors


def products(monkeypatch, kind: str, short: int) -> tuple[int, int]:
    """Scores that a rank alone computes, and how many of these are in a pair with a mask."""
    with_documents(monkeypatch, kind, short)
    x = [tensors(CASES["documents"])[name] for name in "qkv"]
    plan = PanelAttention([Stretch(0, LENGTH)], [[Stretch(0, LENGTH)]], (), "flash", SCALE, True)
    pairs = panels._PanelPairs(plan, x, None, Hiding(BEGINS)).panel_pairs(0)
    each = [(p.score_count * (1 if p.sequences else BATCH), p.relation == MASKED) for p in pairs]
    return sum(n for n, _ in each), sum(n for n, masked in each if masked)


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_scores_are_those_that_documents_leave(kind, monkeypatch):
    """Without masks just these; of documents that share one, no more than the squares of what they have together."""
    at = torch.arange(LENGTH)
    seen = (at[:, None] >= at) & (at >= packed(kind, 3).t()[..., None])
    assert products(monkeypatch, kind, 1) == (seen.sum(), 0)
    total, masked = products(monkeypatch, kind, 4)
    assert total - masked <= seen.sum() and total <= seen.sum() + 4 * 3 * LENGTH


def early(change):
    """The mistake: documents begin, for what is left out, elsewhere than they do."""
    cut = attention_pairs._cut_queries_at_documents
    return lambda *arguments: [(rows, q, change(q, begins)) for rows, q, begins in cut(*arguments)]


@pytest.mark.parametrize("kind", ["drawn", "at the borders of blocks"])
@pytest.mark.parametrize(
    "change",
    [lambda q, b: (b[0] + 1, b[1]), lambda q, b: (b[0], b[0]), lambda q, b: (b[1], b[1])],
    ids=["skips the first key", "shows the first document to all", "skips what the last query does not see"],
)
def test_negative_control_a_wrong_border(change, kind, monkeypatch):
    with_documents(monkeypatch, kind, 8)
    assert max(compared(CASES["documents"], 2, zigzag, True).values()) < 1e-12
    monkeypatch.setattr(attention_pairs, "_cut_queries_at_documents", early(change))
    assert max(compared(CASES["documents"], 2, zigzag, True).values()) > 1e-3


def test_documents_are_read_once_where_they_came_from(monkeypatch):
    """Numbers of a device are known on the host from before, and pairs are made once for all layers."""
    cuts = []
    monkeypatch.setattr(attention_pairs, "_cut_sequences", lambda *arguments: cuts.append(arguments) or iter(()))
    begins = torch.zeros(LENGTH, BATCH, dtype=torch.int64, device="meta")  # which has no numbers to give
    attention_pairs.note_host_copy(begins, torch.zeros(LENGTH, BATCH, dtype=torch.int64))
    for _ in range(2):
        assert attention_pairs.document_pairs(begins, [Stretch(0, LENGTH)], 8, "key", lambda *_: []) == []
    assert len(cuts) == 1 and begins in attention_pairs._KNOWN
    del begins, cuts[:]
    assert not len(attention_pairs._KNOWN)


def test_one_rank_is_one_call(monkeypatch):
    calls = []
    kernel = attention_pairs.FUSED["cpu", "flash"]
    forward = lambda *arguments: calls.append(arguments) or kernel.forward(*arguments)  # noqa: E731
    monkeypatch.setitem(attention_pairs.FUSED, ("cpu", "flash"), kernel._replace(forward=forward))
    parts, _ = on_a_rank(
        CASES["causal"], contiguous(1), contiguous(1), (), SingleRank(Mesh.arrange_axes({"context": 1}))
    )
    assert torch.allclose(parts["out"], one_softmax(CASES["causal"])["out"], rtol=0, atol=1e-13)
    [(_, what)] = calls
    assert what.causal and what.hidden is None


def test_narrow_types_are_merged_in_the_type_of_statistics():
    """Four panels in bf16 are as near to fp64 as one is."""
    c, errors = Case(causal=False), []
    for count in (1, 4):
        x = [tensors(c)[name].bfloat16() for name in "qkv"]
        queries, keys = [Stretch(0, LENGTH)], [Stretch(0, LENGTH)]
        reader = panels._PanelPairs(PanelAttention(queries, [keys], (), "flash", SCALE, False), x, None, Hiding())
        whole, size = panels._MergedResult(x[0], 8), LENGTH // count
        for i in range(count):
            part = [x[0], *(t.narrow(2, i * size, size) for t in x[1:])]
            pair = Pair(queries[0], Stretch(i * size, size), WHOLE, 0, i * size)
            whole.merge_pair(pair, *reader.kernel.forward(part, attention_pairs.Scores(SCALE)))
        out, lse = whole.finish_result(None)
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        s = SCALE * x[0].double() @ x[1].double().repeat_interleave(2, 1).mT
        assert (lse - s.logsumexp(-1)).abs().max() < 1e-4
        errors.append((out - s.softmax(-1) @ x[2].double().repeat_interleave(2, 1)).abs().max().item())
    assert errors[1] < 1.5 * errors[0] < 0.02


def without_the_maximum(out, lse, other, of_other):
    """The mistake: sums of exponentials themselves."""
    mine, others = lse.exp(), of_other.exp()
    share = (others / (mine + others)).nan_to_num_(0)
    out.lerp_(other, share.unsqueeze(-1))
    lse.copy_((mine + others).log())


def test_negative_control_a_merge_without_the_maximum(monkeypatch):
    monkeypatch.setattr(panels, "merge_attention", without_the_maximum)
    assert max(compared(CASES["causal"], 2, contiguous, True).values()) < 1e-12  # of small scores it is right
    assert not max(compared(CASES["large scores"], 2, contiguous, True).values()) < 1


def test_negative_control_a_wrong_offset():
    def late(n):
        return [[Stretch(s.first + (i == 1), s.size) for s in stretches] for i, stretches in enumerate(contiguous(n))]

    keys, c = late(2), CASES["causal"]
    work = partial(on_a_rank, c, contiguous(2), keys, ("context",))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        assert (
            max(differences(one_softmax(c), run_threads(Mesh.arrange_axes({"context": 2}), work), True).values())
            < 1e-12
        )


def test_negative_control_gradients_of_keys_at_the_wrong_rank(monkeypatch):
    right = panels._unpack_message

    def wrong(message, k, v):
        return right(message.roll(1), k, v)

    monkeypatch.setattr(panels, "_unpack_message", wrong)
    assert max(compared(CASES["causal"], 2, contiguous, True).values()) > 1e-3


# which pairs are computed


def test_pairs_of_a_zigzag_are_half_of_all():
    n, length = 4, 64
    size = length // n // 2
    pieces = [[Stretch(i * size, size), Stretch((2 * n - 1 - i) * size, size)] for i in range(n)]
    work = [sum(p.score_count for keys in pieces for p in pair_queries_with_keys(mine, keys, True)) for mine in pieces]
    assert len(set(work)) == 1 and sum(work) == length * (length + 1) // 2
    relations = [
        [(p.relation, p.rows, p.columns) for p in pair_queries_with_keys(pieces[1], keys, True)] for keys in pieces
    ]
    assert relations[1] == [(DIAGONAL, (0, 16), (0, 16))]
    assert relations[0] == [(WHOLE, (0, 16), (0, 8))]
    assert relations[2] == [(WHOLE, (8, 8), (0, 16))]


def test_gathered_keys_are_a_prefix_and_a_diagonal():
    pairs = pair_queries_with_keys([Stretch(16, 8)], [Stretch(0, 32)], True)
    assert [(p.relation, p.columns) for p in pairs] == [(WHOLE, (0, 16)), (DIAGONAL, (16, 8))]
    assert pair_queries_with_keys([Stretch(0, 8)], [Stretch(8, 8)], True) == []
    assert [p.relation for p in pair_queries_with_keys([Stretch(0, 8)], [Stretch(0, 8)], False)] == [WHOLE]


@pytest.mark.parametrize(("block", "diagonal"), [(0, 0), (3, 0), (100, 0), (0, 1), (0, 2), (100, 2)])
@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_pairs_are_what_queries_see(causal, window, block, diagonal):
    if window and not causal:
        return
    queries = [Stretch(3, 5), Stretch(17, 6), Stretch(10, 2)]
    keys = [Stretch(12, 9), Stretch(0, 7), Stretch(30, 4)]
    q, k = rows_of(queries), rows_of(keys)
    seen = torch.zeros(len(q), len(k), dtype=torch.int)
    halves = range(diagonal + 1, 100) if diagonal else range(0)
    for p in pair_queries_with_keys(queries, keys, causal, window, halves, block):
        assert p.relation != DIAGONAL or p.rows.size not in halves
        part = seen.narrow(0, *p.rows).narrow(1, *p.columns)
        if p.relation == WHOLE:
            part += 1
        elif p.relation == DIAGONAL:
            part += torch.ones_like(part).tril()
        else:
            at, memory = p.at + torch.arange(p.rows.size), p.start + torch.arange(p.columns.size)
            assert torch.equal(at, q.narrow(0, *p.rows)) and torch.equal(memory, k.narrow(0, *p.columns))
            behind = at[:, None] - memory
            part += ((behind >= 0) & ((behind < window) if window else True)).int()
        if block:
            assert p.rows.size <= block and p.columns.size <= block
        assert p.relation != MASKED or window or block
    behind = q[:, None] - k
    expected = (behind >= 0) if causal else torch.ones_like(behind, dtype=torch.bool)
    assert torch.equal(seen, (expected & ((behind < window) if window else True)).int())


# kernels of GPUs, which say on `meta` what they take and give


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("masked", [False, True])
def test_kernels_of_gpus_take_what_they_are_given(name, masked):
    if masked and name == "flash":
        return
    make = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    inputs = make(2, 4, 40, 24), make(2, 4, 48, 24), make(2, 4, 48, 24)
    hidden = torch.empty(40, 48, device="meta", dtype=torch.bool) if masked else None
    kernel, what = attention_pairs.FUSED["cuda", name], attention_pairs.Scores(SCALE, False, hidden)
    out, lse = kernel.forward(inputs, what)
    assert (out.shape, lse.shape) == (inputs[0].shape, (2, 4, 40))
    derivatives = kernel.backward(make(out.shape), inputs, (out, lse), what)
    assert [x.shape for x in derivatives[:3]] == [x.shape for x in inputs]


def test_queries_whose_last_dim_is_in_pieces():
    """As a product leaves them that d_kv divides over ranks: torch's kernel reads elements beside theirs."""
    x = [tensors(CASES["causal"])[name] for name in "qkv"]
    plan = PanelAttention([Stretch(0, LENGTH)], [[Stretch(0, LENGTH)]], (), "flash", SCALE, True)
    pieces = [t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for t in x]
    assert all(t.stride(-1) > 1 for t in pieces)
    alone = SingleRank(Mesh.arrange_axes({"data": 1}))
    assert torch.equal(attend_panels(alone, plan, tuple(pieces)), attend_panels(alone, plan, tuple(x)))
    split = [run_threads(alone.mesh, lambda one, of=of: panels.attend_split_keys(one, plan, of, Hiding(), ("data",)))
             for of in (pieces, x)]  # fmt: skip
    assert torch.equal(split[0][0], split[1][0])
