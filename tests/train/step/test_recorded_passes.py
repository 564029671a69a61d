"""Passes that are recorded once and replayed change no bit of a training, whatever differs between steps; on a double
of a GPU's graphs, which has each operation and the memory that it reads and writes (tests/harness/tape.py)."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.config.groups import Train
from platform.launch import compose_config
from platform.plan.layout import Mesh
from platform.plan.schedule import Kind
from platform.predict import recorded_passes
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import has_room_for_graphs, predict_footprints
from platform.runtime import compilation, eight_bits, residual
from platform.runtime.communicator import Communicator, LaunchCounts, SingleRank
from platform.runtime.flat_buffers import FlatBucket
from platform.runtime.parallel_ops import ParallelOps
from platform.runtime.pipeline import StageFailed
from platform.train import rehearsal
from platform.train.faults import Fault
from platform.train.pass_recorder import PassRecorder, RecordedPass
from platform.train.rank_parameters import RankWeights
from platform.train.rehearsal import rehearse_steps
from platform.train.stage_passes import StagePasses
from platform.train.trainer import Trainer
from platform.train.training_state import RankTrainingState
from platform.train.worker import Worker
from tests.harness import tape
from tests.harness.card import KernelCounter, alone, shrunk
from tests.harness.oracle import MODELS, configure, trainer_of, validation_loss
from tests.harness.streams import ROOT
from tests.harness.tape import recording
from tests.harness.threads import run_threads

SIZES = ("microbatch", "global_batch", "mlp_chunks")  # keys of `train` that `configure` has
T, SP = {"tensor": "1d", "axes": {"t": 2}}, {"tensor": "1d_sp", "axes": {"t": 2}}
RC: dict[str, Any] = {"axes": {"r": 2, "c": 2}, "microbatch": 4, "layers": 1}
INTERLEAVED: dict[str, Any] = {"pipeline": "interleaved", "stages": 2, "chunks": 2, "layers": 4}
WIDE: dict[str, Any] = {**MODELS["llama"], "d_model": 64, "d_ff": 128, "layers": 1}  # of several blocks of 8
BLOCKS, ROWS, TENSORS = ({**WIDE, "quantise": {"scale": s, "block": 8}} for s in ("block", "row", "tensor"))
# name -> how many passes of a step are replayed on a rank, and the configuration
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (8, {"dropout": 0.1}),
    "one microbatch": (2, {"microbatch": 8, **MODELS["llama"]}),
    "compiled": (4, {"microbatch": 4, "dropout": 0.1, "compile": "on"}),
    "labels that differ": (4, {"microbatch": 4, "layers": 1, **MODELS["bert"]}),
    "encoder and decoder": (4, {"microbatch": 4, **MODELS["t5"], "layers": 1}),
    "loss scale": (4, {"microbatch": 4, "precision": "fp16"}),
    "bf16": (4, {"microbatch": 4, "precision": "bf16", **MODELS["gqa_tied"]}),
    "recomputed": (4, {"microbatch": 4, "recompute": "full", "dropout": 0.1}),
    "data": (2, {"data": 2, "dropout": 0.1}),
    "zero 1": (4, {"data": 2, "zero": 1, "microbatch": 1, "dropout": 0.1}),
    "zero 1, nothing beside": (4, {"data": 2, "zero": 1, "overlap": False}),
    "zero 2": (6, {"data": 2, "zero": 2, "microbatch": 1, "dropout": 0.1}),
    "zero 2, nothing beside": (4, {"data": 2, "zero": 2, "overlap": False}),
    "zero 2, bf16": (6, {"data": 2, "zero": 2, "microbatch": 1, "precision": "bf16", **MODELS["gqa_tied"]}),
    "zero 2, 1d": (6, {**T, "data": 2, "zero": 2, "microbatch": 1, "compile": "on"}),
    "zero 2, interleaved": (12, {**INTERLEAVED, "data": 2, "zero": 2, "microbatch": 1}),
    "longer and longer": (8, {"length_ramp": ["0:8", "3:16"], **MODELS["llama"]}),
    "growing batch": (0, {"ramp_from": 2, "ramp_by": 2, "ramp_samples": 6}),
    "adapters": (4, {"microbatch": 4, "tune": {"kind": "lora", "rank": 4, "dropout": 0.1}}),
    "frozen": (4, {"microbatch": 4, "freeze": ["layers.0.*"], **MODELS["llama"]}),
    "rows in parts": (4, {"microbatch": 4, "mlp_chunks": 2}),
    "bytes of moments": (4, {"microbatch": 4, "precision": "bf16", "masters": "split", "moments": "int8"}),
    "latent": (4, {"microbatch": 4, **MODELS["latent"]}),
    "whole_bert": (4, {"microbatch": 4, **MODELS["whole_bert"]}),
    "whole_t5": (4, {"microbatch": 4, **MODELS["whole_t5"]}),
    "original": (4, {"microbatch": 4, **MODELS["original"]}),
    "uneven": (2, {"data": 3, "microbatch": 1, "zero": 1}),
    "1d": (8, {**T, "dropout": 0.1}),
    "1d_sp": (6, {**SP, **MODELS["llama"], "layers": 1}),
    "1d, zero 1": (4, {**T, "data": 2, "zero": 1, "microbatch": 1, "dropout": 0.1}),
    "1d, compiled": (4, {**T, "microbatch": 4, "compile": "on", "dropout": 0.1}),
    "1d_sp, compiled, recomputed": (6, {**SP, "compile": "on", "recompute": "full"}),
    "2d": (2, {"tensor": "2d", **RC}),
    "2d_gather": (2, {"tensor": "2d_gather", **RC, **MODELS["gpt_untied"]}),
    "2d_gather, again": (2, {"tensor": "2d_gather", **RC, "gathered": "again", "recompute": "full"}),
    "3d": (2, {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}, "microbatch": 4, "layers": 1}),
    "2p5d": (2, {"tensor": "2p5d", "axes": {"d": 2, "r": 2, "c": 2}, "microbatch": 4, "layers": 1}),
    "dsp": (2, {"branch": "dsp", "branch_axes": {"g": 2}, "microbatch": 4}),
    "dsp_slice": (2, {"branch": "dsp_slice", "branch_axes": {"g": 2}, "microbatch": 4, **MODELS["t5"], "layers": 1}),
    "d_model": (4, {"tensor": "layout", "axes": {"p": 2}, "rules": {"d_model": ["p"]}, "microbatch": 4}),
    "experts": (4, {"microbatch": 4, **MODELS["experts"], "layers": 1}),
    "experts, 1d": (4, {**T, "microbatch": 4, **MODELS["experts"]}),
    "experts apart": (2, {"data": 2, "experts_of": 2, **MODELS["experts"]}),
    "experts, compiled": (4, {"microbatch": 4, "compile": "on", **MODELS["experts"], "layers": 1}),
    "1f1b": (8, {"pipeline": "1f1b", "stages": 2, "dropout": 0.1}),
    "1f1b, data": (6, {"pipeline": "1f1b", "stages": 2, "data": 2, "microbatch": 1, **MODELS["llama"]}),
    "interleaved": (16, {**INTERLEAVED, **MODELS["gqa_tied"]}),
    "gpipe": (8, {"pipeline": "gpipe", "stages": 2, **MODELS["t5"], "dropout": 0.1}),
    "zb_h1": (12, {"pipeline": "zb_h1", "stages": 2, "dropout": 0.1}),
    "gpipe, lone": (8, {"pipeline": "gpipe"}),
    "1f1b, 1d_sp": (6, {"pipeline": "1f1b", "stages": 2, **SP}),
    "1f1b, growing batch": (0, {"pipeline": "1f1b", "stages": 2, "ramp_from": 2, "ramp_by": 2, "ramp_samples": 6}),
    "interleaved, zero 1": (8, {**INTERLEAVED, "data": 2, "zero": 1, "microbatch": 1}),
    "interleaved, longer": (16, {**INTERLEAVED, **MODELS["llama"], "layers": 4, "length_ramp": ["0:8", "3:16"]}),
    "interleaved, experts": (16, {**INTERLEAVED, **MODELS["experts"], "layers": 4}),
    "zb_h1, compiled": (12, {"pipeline": "zb_h1", "stages": 2, "compile": "on", **MODELS["llama"]}),
    "8 bits, data": (2, {**BLOCKS, "data": 2}),
    "8 bits, 1d": (8, {**ROWS, **T}),
    "8 bits, 1d_sp, data, zero 1": (4, {**TENSORS, **SP, "data": 2, "zero": 1, "microbatch": 1}),
    "8 bits, compiled, bf16": (4, {**BLOCKS, "microbatch": 4, "compile": "on", "precision": "bf16"}),
    "8 bits, recomputed": (4, {**ROWS, "microbatch": 4, "recompute": "full"}),
    "8 bits, 2d": (2, {**BLOCKS, "tensor": "2d", **RC}),
    "8 bits, interleaved": (16, {**BLOCKS, **INTERLEAVED}),
    "8 bits, experts": (4, {**MODELS["experts"], "layers": 1, "microbatch": 4, "quantise": {"scale": "row"}}),
    "context": (2, {"context": 2, "microbatch": 4, **MODELS["llama"]}),
}  # fmt: skip
Step = tuple[int, dict[str, Any]]
# a step that is skipped, one that is done again, one under a fault
STEPS: list[Step] = [(1, {}), (2, {"limit": 0.5}), (2, {}), (3, {}), (4, {"fault": Fault(4, "nan", 0)}), (5, {})]
EVALUATED = 3


def configured(plan: str) -> Config:
    settings = {"precision": "fp32", "layers": 2, "microbatch": 2, **PLANS[plan][1]}
    of_train = {f.name: settings.pop(f.name) for f in fields(Train) if f.name in settings and f.name not in SIZES}
    overlap, tune, quantise = settings.pop("overlap", True), settings.pop("tune", {}), settings.pop("quantise", {})
    of_optimizer = {name: settings.pop(name) for name in ("masters", "moments") if name in settings}
    c = configure(**settings)
    c.tune, c.optimizer = replace(c.tune, **tune), replace(c.optimizer, **of_optimizer)
    c.quantise = replace(c.quantise, **quantise)
    c.parallel.overlap, c.train = overlap, replace(c.train, **of_train, graphs="on", ema=0.9, steps=len(STEPS))
    return c


def run(c: Config, records: bool, replays: list[int] | None = None, infinite: int = -1) -> list[Any]:
    """What each rank reports, and its state, after each step; and how many passes of each step were replayed. In the
    `infinite`-th step a weight of the first rank is so."""
    plan = make_plan(c)

    def work(communicator):
        trainer, seen = trainer_of(c, plan, communicator), []
        trainer.weights.begin_averages()
        trainer.updates_early = c.precision != "fp16"
        if records:
            rehearse_steps(trainer, 1)
        state = RankTrainingState(trainer)
        communicator.log = []
        for number, (step, how) in enumerate(STEPS):
            before = replayed(trainer)
            ahead = STEPS[number + 1][0] if trainer.updates_early and number in (2, 3) else 0
            with infinite_weight(trainer) if number == infinite and not trainer.communicator.rank else nullcontext():
                report = trainer.step(step, then=ahead, **how)
            if replays is not None and not ahead and number not in (3, 4):
                replays.append(replayed(trainer) - before)
            numbers = [report.loss, report.grad_norm, report.skipped, report.samples, report.comm_bytes, report.routed]
            blocks = {block.name: block.tensor.detach().clone() for block in state.live_blocks()}
            numbers.append(communicator.log[:])
            seen.append((str(numbers), validation_loss(trainer) if step == EVALUATED else 0.0, blocks))
        return seen

    return run_threads(plan.mesh, work) if plan.mesh.world_size > 1 else [work(SingleRank(plan.mesh))]


@contextmanager
def infinite_weight(trainer: Trainer) -> Iterator[None]:
    name = "layers.0.mlp.up"
    (weight,) = (b.compute[name].detach().view(-1)[:1] for b in trainer.weights.buckets if name in b.compute)
    before = weight.clone()
    weight.fill_(torch.inf)
    yield
    weight.copy_(before)


def replayed(trainer: Trainer) -> int:
    recorders = [passes.recorder for passes in trainer._of_lengths.values()]
    return sum(graph.replayed for recorder in recorders if recorder for graph, *_ in recorder._passes.values())


def differences(c: Config, replays: list[int] | None = None, infinite: int = -1) -> list[str]:
    unequal: list[str] = []
    others = run(c, False, infinite=infinite)
    with recording():
        for ours, wanted in zip(run(c, True, replays, infinite), others, strict=True):
            for (step, _), (numbers, loss, blocks), (right, other, kept) in zip(STEPS, ours, wanted, strict=True):
                unequal += [f"step {step}: {numbers} {loss}, not {right} {other}"] * ((numbers, loss) != (right, other))
                pairs = {name: (blocks[name].nan_to_num(7), kept[name].nan_to_num(7)) for name in blocks}
                unequal += [f"step {step}: {name}" for name, pair in pairs.items() if not torch.equal(*pair)]
    return unequal


FEW = ("zero 1", "zero 2", "labels that differ", "1d_sp")


@pytest.mark.parametrize("plan", [*FEW, *(pytest.param(p, marks=pytest.mark.full) for p in PLANS if p not in FEW)])
def test_replayed_passes_change_nothing(plan, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")  # whose operations are torch's
    replays: list[int] = []
    assert differences(configured(plan), replays) == []
    expected = {PLANS[plan][0]} if "growing batch" not in plan else {2, 4, 6, 8}
    assert set(replays) <= expected and replays


@pytest.mark.full
def test_a_maximum_that_is_infinite_skips_a_step():
    """Of a rank's part of a row in 8 bits, which all ranks ask for within their passes; the others are done."""
    c, replays = configured("8 bits, 1d"), list[int]()
    assert differences(c, replays, infinite=0) == [] and set(replays) == {8}
    skipping = [step[0] for step in run(c, False, infinite=0)[0]]
    assert "nan" in skipping[0] and "nan" not in skipping[1]


def bake_keys(patch: pytest.MonkeyPatch) -> None:
    """Starts of random numbers are made in a pass, of numbers of the host."""

    def drawing(self, name, spec, device, kind="dropout", rate=None):
        if drawing_numbers := draw(self, name, spec, device, kind, rate):
            stream = self._find_random_stream(
                (kind, name, next(n for k, m, n in self._drawings if (k, m) == (kind, name)))
            )
            return drawing_numbers._replace(start=residual.random_start(*stream, device))
        return None

    draw = ParallelOps.random_drawing
    patch.setattr(ParallelOps, "random_drawing", drawing)


def bake_divisors(patch: pytest.MonkeyPatch) -> None:
    """Losses are divided by a number of the host."""
    patch.setattr(StagePasses, "divisor", property(lambda self: Divisor(self), lambda self, x: None), raising=False)


class Divisor:
    """What a sum is divided by, in the host's memory."""

    def __init__(self, passes: StagePasses):
        self.value = 1.0

    def fill_(self, value: float) -> float:
        return value


def move_inputs(patch: pytest.MonkeyPatch) -> None:
    """The data of a microbatch lies at another address than that of the one that was recorded, which is freed."""
    patch.setattr(PassRecorder, "_write_position", lambda self, slot: None)


def keep_inputs(patch: pytest.MonkeyPatch) -> None:
    """The data of a microbatch lies at another address than that of the one that was recorded, which is still there."""

    def write(self, slot) -> None:
        kept.append(self._ops.position)

    kept: list[Any] = []
    patch.setattr(PassRecorder, "_write_position", write)


def move_sums(patch: pytest.MonkeyPatch) -> None:
    """Sums of gradients lie where a pass has allocated them, and are freed at the end of a step."""
    patch.setattr(FlatBucket, "keep_sums", lambda self: None)


def forget_sums(patch: pytest.MonkeyPatch) -> None:
    """Sums of gradients are kept, but for that the host does not know that they are there."""
    patch.setattr(FlatBucket, "note_replayed_gradients", lambda self, names: self._gradient_sum_buffer())


def move_shards(patch: pytest.MonkeyPatch) -> None:
    """Sums of what ranks have of reduced gradients lie where a step's first pass allocates them."""
    finish = FlatBucket.finish_pass_reduction

    def finish_elsewhere(self) -> None:
        lasting, self._lasting = self._lasting, None
        finish(self)
        self._lasting = lasting

    patch.setattr(FlatBucket, "finish_pass_reduction", finish_elsewhere)


def reduce_again(patch: pytest.MonkeyPatch) -> None:
    """The host does not know that a replayed pass has reduced its gradients."""
    end = RankWeights.end_backward_pass

    def forget_reductions(self, chunk, is_complete) -> None:
        for flat in self.trained:
            flat.launched = False
        end(self, chunk, is_complete)

    patch.setattr(RankWeights, "end_backward_pass", forget_reductions)


def count_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Sums of what routers choose are in other memory after each pass."""
    count = ParallelOps.count_routed

    def count_routed(self, name, counts, axes) -> None:
        self.routed = {n: x.clone() for n, x in self.routed.items()}
        count(self, name, counts, axes)

    patch.setattr(ParallelOps, "count_routed", count_routed)


def keep_scales(patch: pytest.MonkeyPatch) -> None:
    """Numbers are rounded to 8 bits by the maxima of an earlier pass."""
    kept: dict[Any, Tensor] = {}
    choose = eight_bits.choose_factors

    def choose_once(maxima, *how):
        return kept.setdefault((maxima.shape, *how), choose(maxima, *how))

    patch.setattr(eight_bits, "choose_factors", choose_once)


def forget_launches(patch: pytest.MonkeyPatch) -> None:
    """Collectives of a replayed pass are not counted, nor logged."""
    patch.setattr(Communicator, "count_launches", lambda self, counts: None)


def share_memory(patch: pytest.MonkeyPatch) -> None:
    """Microbatches that are in flight at once are recorded in the same memory."""
    of_ranks: dict[int, tape.Pool] = {}
    make = tape.Pool
    patch.setattr(tape, "Pool", lambda: of_ranks.setdefault(threading.get_ident(), make()))


def keep_flow(patch: pytest.MonkeyPatch) -> None:
    """What a neighbour sends is not copied to where a recorded pass reads it."""
    replay = PassRecorder._replay
    patch.setattr(PassRecorder, "_replay", lambda self, recorded, tensors: replay(self, recorded, recorded.inputs))


CONTROLS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "keys of the host": ("whole", bake_keys),
    "divisors of the host": ("labels that differ", bake_divisors),
    "data elsewhere, memory freed": ("labels that differ", move_inputs),
    "data elsewhere": ("labels that differ", keep_inputs),
    "sums elsewhere": ("labels that differ", move_sums),
    "sums that are not known": ("labels that differ", forget_sums),
    "sums of shards elsewhere": ("zero 2", move_shards),
    "reductions that are not known": ("zero 2, nothing beside", reduce_again),
    "counts elsewhere, memory freed": ("experts", count_elsewhere),
    "launches that are not counted": ("1d_sp", forget_launches),
    "memory of two in flight": ("1f1b", share_memory),
    "activations that do not arrive": ("1f1b", keep_flow),
    "scales of another pass": ("8 bits, data", keep_scales),
}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.filterwarnings("ignore:train.graphs")
def test_negative_control(control, monkeypatch):
    plan, spoil = CONTROLS[control]
    c = configured(plan)
    c.train.graphs = "auto"
    others = run(c, False)
    spoil(monkeypatch)
    with recording():
        if control == "memory of two in flight":  # numbers are read there that no pass has written
            with pytest.raises(StageFailed, match="out of bounds|not finite"):
                run(c, True)
        elif control.endswith("freed"):
            with pytest.raises(StageFailed, match="a graph reads or writes memory that is gone"):
                run(c, True)
        else:
            assert str([seen[:2] for seen in run(c, True)[0]]) != str([seen[:2] for seen in others[0]])


def test_a_slot_has_one_microbatch_in_flight(monkeypatch):
    """Two of 1f1b's first stage are."""
    c = configured("1f1b")
    monkeypatch.setattr(rehearsal, "count_in_flight", lambda row: {0: 1, 1: 1})
    with recording(), pytest.raises(RuntimeError, match="a slot has one microbatch in flight"):
        run(c, True)


@pytest.mark.parametrize("plan", ["labels that differ", "zero 2, nothing beside"])
@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: torch.tensor([1.0, 2.0])], ids=["to", "from"])
def test_passes_that_cannot_be_recorded_are_computed(read, plan, monkeypatch):
    """Numbers stay equal where `auto` may record and a pass turns out to read or write the host; `on` fails."""

    def watch(self, name, x, spec):
        read(x.sum())
        return x

    monkeypatch.setattr(ParallelOps, "watch", watch)
    c = configured(plan)
    c.train.graphs = "auto"
    with pytest.warns(UserWarning, match="passes are not recorded.*operation not permitted when stream is capturing"):
        assert differences(c) == []
    c.train.graphs = "on"
    with pytest.raises(RuntimeError, match="train.graphs=on: .*capturing"):
        differences(c)


@pytest.mark.filterwarnings("ignore:train.graphs")
@pytest.mark.parametrize("plan", ["zero 2", "zero 2, nothing beside"])
def test_a_backward_pass_that_cannot_be_recorded_drops_its_reductions(plan, monkeypatch):
    """Numbers of the steps that follow stay equal to those of runs that record nothing."""
    finish = FlatBucket.finish_pass_reduction

    def read_shard(self) -> None:
        torch.ones(1).sum().item()
        finish(self)

    monkeypatch.setattr(FlatBucket, "finish_pass_reduction", read_shard)
    c, replays = configured(plan), []
    c.train.graphs = "auto"
    assert differences(c, replays) == [] and set(replays) == {0}


@pytest.mark.filterwarnings("ignore:train.graphs")
def test_no_rank_records_where_another_cannot(monkeypatch):
    """Collectives of a graph are those of graphs on all ranks of a group. Negative control: each decides by itself."""

    def watch(self, name, x, spec):
        if self.communicator.rank:
            x.sum().item()
        return x

    monkeypatch.setattr(ParallelOps, "watch", watch)
    c, replays = configured("1d_sp"), []
    c.train.graphs = "auto"
    assert differences(c, replays) == [] and set(replays) == {0}
    c.train.graphs = "on"
    with pytest.raises(RuntimeError, match="train.graphs=on: .*(capturing|another rank)"):
        differences(c)
    c.train.graphs = "auto"
    monkeypatch.setattr(Communicator, "is_true_anywhere", lambda self, is_true: is_true)
    assert differences(c, replays) == [] and {0, 6} <= set(replays)


@pytest.mark.parametrize("waits", ["", "inside", "outside"])
def test_a_collective_is_waited_for_where_it_was_launched(waits):
    """As a capture of CUDA demands."""

    def work(communicator: Communicator) -> Tensor:
        x, graph = torch.ones(2), torch.cuda.CUDAGraph()
        before = communicator.launch("all_reduce", x, ["t"])
        with torch.cuda.graph(graph):
            handle = communicator.launch("all_reduce", x, ["t"])
            if waits:
                y = (handle if waits == "inside" else before).wait() + 1
        assert not y.equal(x + 2), "nothing is executed while it is recorded"
        before.wait()
        graph.replay()
        return graph.tape[-1][-1][0][1].tensor()

    with recording():
        if waits == "inside":
            assert all(x.tolist() == [3, 3] for x in run_threads(Mesh((("t", 2),)), work))
        else:
            with pytest.raises(RuntimeError, match="captur"):
                run_threads(Mesh((("t", 2),)), work)


def test_a_worker_drops_its_graphs_before_it_aborts_groups():
    """NCCL's abort of a group waits until no graph has collectives of it, and a leave for that abort."""
    events: list[str] = []
    ops, weights = ParallelOps.__new__(ParallelOps), RankWeights.__new__(RankWeights)
    recorder = PassRecorder(SingleRank(Mesh(())), ops, weights, {0: 1}, {}, {})
    graph = SimpleNamespace(reset=lambda: events.append("reset"))
    recorder._passes[(0, 0), Kind.FORWARD, False] = RecordedPass(graph, {}, {}, LaunchCounts(Counter(), {}, []))
    passes, trainer, worker = StagePasses.__new__(StagePasses), Trainer.__new__(Trainer), Worker.__new__(Worker)
    passes.recorder, trainer._of_lengths = recorder, {16: passes}
    worker.communicator = SimpleNamespace(abort=lambda: events.append("abort"), close=lambda: events.append("close"))
    worker.trainer, worker.memories, worker.device, worker._profile = trainer, {}, "cpu", None
    worker.leave()
    assert events == ["reset", "abort", "close"] and passes.recorder is None


def test_weights_that_are_loaded_are_read_by_recorded_passes():
    """A load writes the memory that graphs read: a step behind it has the loss of the one that they are from."""
    c = configured("labels that differ")
    plan = make_plan(c)
    losses = []
    with recording():
        for steps in (3, 0):
            trainer = trainer_of(c, plan, SingleRank(plan.mesh))
            rehearse_steps(trainer, 1)
            for step in range(1, steps + 1):
                trainer.step(step)
            masters = trainer.weights.master
            if steps:
                kept = {name: w.detach().clone() for name, w in masters.items()}
            else:
                with torch.no_grad():
                    for name, w in masters.items():
                        w.copy_(kept[name])
                trainer.weights.refresh_copies()
            losses.append(trainer.step(4).loss)
    assert losses[0] == losses[1]


class Counted:
    """torch.cuda.CUDAGraph and torch.cuda.graph on the card that is not there: counts launches."""

    replays = 0

    def __init__(self, *positional: Any, **named: Any):
        pass

    def replay(self) -> None:
        Counted.replays += 1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *why: Any) -> None:
        pass


def test_a_replayed_microbatch_is_launched_by_few_calls(monkeypatch):
    """On the card that is not there: a launch for each pass and one that writes its data, no read, and few calls of
    our functions beside those that load data."""
    c = shrunk(compose_config(["+experiment=one_gpu", "train.graphs=on", "cluster.device=cuda"]))
    c.train.global_batch = 4 * c.train.microbatch
    monkeypatch.setattr(recorded_passes, "RECORDING", {"card", "cuda"})
    for name, value in {"CUDAGraph": Counted, "graph": Counted, "graph_pool_handle": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    reads: list[int] = []
    with alone(c, 0, reads) as trainer:
        rehearse_steps(trainer, 1)
        reads.clear()
        calls, run = [], PassRecorder.run_pass

        def counted(self, recorded, begin, action, tensors, compute):
            def begun(chunk: int, m: int) -> None:
                sys.setprofile(None)
                begin(chunk, m)
                sys.setprofile(note)

            def note(frame, event, argument):
                calls[-1] += event == "call" and frame.f_code.co_filename.startswith(str(ROOT))

            calls.append(0)
            sys.setprofile(note)
            outputs = run(self, recorded, begun, action, tensors, compute)
            sys.setprofile(None)
            return outputs

        monkeypatch.setattr(PassRecorder, "run_pass", counted)
        before = Counted.replays
        with KernelCounter(trainer.communicator) as counter:
            trainer.step(1)
    assert Counted.replays - before == len(calls) == 2 * 4
    assert counter.sections["forward"].launched == counter.sections["backward"].launched == 0
    assert len(reads) == 1
    assert counter.sections["other"].kernels["_foreach_copy_"] <= 2 * 4
    assert max(calls) <= 30


REASONS: list[tuple[str, list[str]]] = [
    ("train.graphs=off", ["train.graphs=off"]),
    ("each microbatch gathers weights", ["parallel.data=2", "parallel.zero=3"]),
    (
        "gradients that are reduced have passes of their own",
        ["pipeline=zb_h1", "pipeline.stages=2", "parallel.data=2", "parallel.zero=2"],
    ),
    ("ranks make weights of 4 bits", ["tune=qlora"]),
    ("the host counts its experts' rows", ["model.experts=4", "model.capacity_factor=0"]),
    ("the host reads where documents begin", ["data.document_mask=true"]),
    ("attention's kernels draw", ["model.dropout=0.1", "model.fused_dropout=true"]),
    ("move what they multiply", [*"tensor=1d_sp tensor.axes.t=2 parallel.data=1 tensor.async_products=on".split()]),
    ("further losses", ["model.predict_ahead=1"]),
    ("activations go to host memory", ["recompute=full", "recompute_offload=true"]),
    ("monitor.timeline", ["monitor.timeline=true"]),
    ("more than 64 microbatches are in flight", ["pipeline=gpipe", "train.microbatch=1", "train.global_batch=65"]),
    ("collectives run beside all passes", ["parallel.data=2", "train.global_batch=2", "train.microbatch=1"]),
]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_table_of_a_user_takes_microbatches_in_order(order, tmp_path):
    """Of one stage; else the first backward pass would add to sums that are not there."""
    c = compose_config(["+experiment=one_gpu", "cluster.device=cuda"])
    table = tmp_path / "table.txt"
    table.write_text(",".join(["0F0", "0F1", *(f"0B{m}" for m in order)]) + "\n")
    c.pipeline.kind, c.pipeline.file = "file", str(table)
    c.train.global_batch = 2 * c.train.microbatch
    why = recorded_passes.reason_against_graphs(c, make_plan(c), "cuda")
    assert ("order" in why) is (order != [0, 1]), why


def test_memory_of_passes_in_flight():
    """Passes of 1f1b's first stage of four have four slots, each with its own working memory; the last one's have one;
    two microbatches are computed beside them, as gradients are reduced and shards gathered; one under ZeRO-2, which
    reduces gradients in each pass."""
    keys = ["pipeline=1f1b", "pipeline.stages=4", "train.microbatch=1", "train.global_batch=16", "eval.every=0"]
    for zero, beside in ((0, 1), (1, 2), (2, 1)):
        at = [f"parallel.zero={zero}", "parallel.data=2"]
        c = compose_config(["+experiment=one_gpu", "cluster.device=cuda", *keys, *at])
        plan = make_plan(c)
        eager = predict_footprints(c, plan)
        c.train.graphs = "on"
        for stage, (usual, recorded) in enumerate(zip(eager, predict_footprints(c, plan), strict=True)):
            slots = 4 - stage
            wanted = slots * usual.working + usual.activations * min(slots, beside) // slots
            assert recorded.recorded == wanted and recorded.activations == usual.activations


@pytest.mark.parametrize(("reason", "changes"), REASONS)
def test_where_no_pass_is_recorded_the_plan_says_why(reason, changes):
    c = compose_config(["+experiment=one_gpu", "cluster.device=cuda", *changes])
    assert reason in recorded_passes.reason_against_graphs(c, make_plan(c), "cuda")
    if changes != ["train.graphs=off"]:
        c.train.graphs = "on"
        with pytest.raises(ConfigError, match="train.graphs=on: .*nearest legal: auto"):
            make_plan(c)


def test_memory_has_room_for_recorded_passes_and_for_all_else():
    """Of a run without evaluations there is nothing else but an update; of one with them, passes once more."""
    c = compose_config(["+experiment=one_gpu", "cluster.device=cuda", "eval.every=0"])
    plan = make_plan(c)
    (eager,) = predict_footprints(c, plan)
    c.train.graphs = "on"
    (alone,) = predict_footprints(c, plan)
    c.eval.every = 10
    (beside,) = predict_footprints(c, plan)
    assert eager.recorded == 0 < beside.recorded == eager.activations + eager.working
    assert alone.recorded < eager.activations / 100 and alone.gradients >= eager.gradients
    c.train.graphs = "auto"
    assert predict_footprints(c, plan) == [eager]
    assert has_room_for_graphs(c, plan, beside.total_bytes)
    assert not has_room_for_graphs(c, plan, beside.total_bytes - 1)
