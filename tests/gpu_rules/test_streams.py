"""Nothing in a step touches memory that work in another stream still uses, and every wait of the runtime is needed for
that: the streams of whole steps are followed on a card that is not there (`tests.harness.streams`)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from platform.checkpoint import buffer
from platform.checkpoint.snapshots import MemoryMap, RankSnapshots, SharedMemory, Snapshot
from platform.optimizer.optimizers import PIECES
from platform.plan.generation_passes import PIECE
from platform.runtime import attention_pairs, clock
from platform.runtime.communicator import Communicator
from platform.runtime.process_groups import join_default_group
from platform.runtime.residency import ParameterResidency
from platform.train import generator, rank_parameters
from platform.train import trainer as trainer_module
from platform.train.rank_parameters import RankWeights
from platform.train.replies import AskedTexts, Choice
from platform.train.state_recovery import COPIES, _find_damaged_copies, compare_replicas
from platform.train.trainer import Trainer
from platform.train.training_state import RankTrainingState
from platform.train.worker import Worker
from tests.harness import suite
from tests.harness.card import CARD
from tests.harness.oracle import MODELS, configure, validation_loss
from tests.harness.streams import POOL, ROOT, Note, Recorder, Work, races, recorded, shared, waits

Run = Callable[[Trainer, pytest.MonkeyPatch], None]


def train(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Steps around an evaluation."""
    trainer.step(1)
    validation_loss(trainer)
    trainer.step(2)


def form(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The first messages and collectives of a generation, which say who is there."""
    communicator, neighbours = trainer.communicator, trainer.plan.neighbour_stages
    own_stage = communicator.coordinates["stage"]
    extents = [communicator.mesh.count_ranks(axes) for axes in communicator._groups]
    peers = [
        communicator._stage_peer(stage)
        for pair in neighbours
        if own_stage in pair
        for stage in pair
        if stage != own_stage
    ]
    said, read = iter([*([float(n), 0.0] for n in extents), *([float(n)] for n in peers)]), Communicator.read_numbers
    patch.setattr(Communicator, "read_numbers", lambda self, x: read(self, x) and next(said))
    communicator.open_stage_connections(neighbours)
    assert not [*said]


def write(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Three tokens of two texts, up to where the text is made of them."""
    continue_texts(trainer, patch, [[1, 2, 3], [4, 5]])


def write_long(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Three tokens of one text that ranks of a context share, as it is longer than a piece."""
    copy = attention_pairs._HostCopy(np.zeros((PIECE + 1, 1), int), {})  # of where documents begin
    patch.setattr(attention_pairs, "_find_host_copy", lambda _: copy)
    continue_texts(trainer, patch, [[1] * (PIECE + 1)])


def continue_texts(trainer: Trainer, patch: pytest.MonkeyPatch, texts: list[list[int]]) -> None:
    """Three tokens of each text, up to where the text is made of them."""
    patch.setattr(torch.Tensor, "any", lambda *_: True)  # texts that go on
    writer = generator.TextGenerator(trainer.config, trainer.plan, trainer.communicator, trainer.weights)
    asked = AskedTexts(texts), 3, Choice(vocab=61), [60]
    with torch.no_grad(), pytest.raises(DynamicOutputShapeException):
        writer.continue_texts(*asked)


def write_after(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Texts directly after an update."""
    trainer.step(1)
    write(trainer, patch)


def compare(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Compute copies against those of replicas, and against fresh ones, as where these differ."""
    trainer.step(1)
    with pytest.raises(DataDependentOutputException):
        compare_replicas(trainer, RankTrainingState(trainer), None)
    with pytest.raises(DataDependentOutputException):
        _find_damaged_copies(trainer, [f"{COPIES}.{next(iter(trainer.weights.compute))}"])


def lend(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Steps of which the second one's second rank computes the first one's first expert too."""
    patch.setattr(trainer_module, "lent_by_layer", lambda layers, *_: dict.fromkeys(layers, ((), (0,))))
    trainer.step(1)
    trainer.step(2)


def host_kept(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Steps whose blocks' inputs are in host memory meanwhile."""
    trainer.step(1)
    trainer.step(2)


def stream_states(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Steps whose states are in host memory in between, around an evaluation, and snapshots of these."""
    patch.setitem(PIECES, "card", 1 << 9)
    patch.setattr(rank_parameters, "_PIECE", 1 << 9)
    worker = worker_of(trainer, patch)
    worker.step(1)
    validation_loss(trainer)
    worker.step(2)
    worker.step(3)


def worker_of(trainer: Trainer, patch: pytest.MonkeyPatch) -> Worker:
    """A worker of two nodes that copies its snapshots beside the next step. What marks them as whole in host memory,
    whose numbers are not there either, is left out. What passes them on is noted as a thread's (`Recorder.beside`), but
    is none: fake tensors allow no second one."""
    beside = trainer.communicator._recorder.beside
    executor = SimpleNamespace(submit=lambda do: SimpleNamespace(result=beside(do)), shutdown=lambda wait: None)
    patch.setattr(futures, "ThreadPoolExecutor", lambda *_: executor)
    patch.setattr(Snapshot, "mark_incomplete", lambda self: self.__dict__.update(whole=None))
    patch.setattr(Snapshot, "mark_complete", lambda self, step, values: self.__dict__.update(whole=step))
    patch.setattr(Snapshot, "step", property(lambda self: self.__dict__.get("whole")))
    worker, state = Worker.__new__(Worker), RankTrainingState(trainer)
    worker.config, worker.communicator, worker.trainer, worker.state = (
        trainer.config,
        trainer.communicator,
        trainer,
        state,
    )
    worker.generation, worker.late, worker._unheld, worker._updated, worker._profile = 0, True, None, None, None
    worker.combiner = SimpleNamespace(combine_reports=lambda report: report)
    held = MemoryMap(state.held, ["one node", "another"], shared=False)
    worker.memories = {0: RankSnapshots(held, 0, {0: SharedMemory.create()}, pinned=True)}
    return worker


def snapshot(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Snapshots beside the next steps, and one of a state that was restored."""
    worker = worker_of(trainer, patch)
    for step in (1, 2, 3):
        worker.step(step)
    assert worker.memories[0].complete_steps == [1, 2]
    for block in worker.state.live_blocks():
        block.tensor.detach().zero_()  # stands for what a checkpoint has
    worker.take_snapshot(3)


class Case(NamedTuple):
    """A plan (arguments of `configure`; `settings`: of its configuration) and what one of its ranks does."""

    plan: dict[str, Any] = {}  # noqa: RUF012
    run: Run = train
    rank: int = 0
    model: str = "gpt"
    settings: dict[str, Any] = {}  # noqa: RUF012


TWO = {"data": 2, "microbatch": 2, "layers": 1}
PAIR = {"pipeline": "1f1b", "stages": 2, "microbatch": 2}
T, RC, XYZ = (
    {"axes": {"t": 2}, "layers": 1},
    {"axes": {"r": 2, "c": 2}, "layers": 1},
    {"axes": {"x": 2, "y": 2, "z": 2}},
)
# each number that is read is 1: a copy of a token has a row at each of three seats
LENT = {"parallel.lent_experts": 1, "model.experts_per_token": 3}
PAIRED = {"microbatch": 1, "global_batch": 4, "experts_of": 2, "pair_passes": "on"}
HOST_KEPT = {"recompute": "full", "offload": True}
MEMORY_LENGTH = {"tensor": "layout", "axes": {"m": 2}, "rules": {"memory_length": ["m"], "d_kv": []}, "layers": 1}
CASES = {
    "passes in pairs": Case({**TWO, **PAIRED}, model="experts"),
    "zero=0": Case(TWO),
    "zero=1": Case({**TWO, "zero": 1}),
    "zero=2": Case({**TWO, "zero": 2}),
    "zero=3": Case({**TWO, "zero": 3}),
    "timeline": Case(MEMORY_LENGTH, settings={"monitor.timeline": True}),
    "1d": Case({"tensor": "1d", **T}),
    "1d_sp": Case({"tensor": "1d_sp", **T}),
    "1d_sp, products that gather and scatter": Case({"tensor": "1d_sp", **T, "async_products": "on"}),
    "1f1b": Case(PAIR),
    "1f1b, last stage": Case(PAIR, rank=1),
    "interleaved": Case({**PAIR, "pipeline": "interleaved", "chunks": 2, "layers": 4}),
    "snapshot": Case({"pipeline": "gpipe", "stages": 2}, snapshot),
    "snapshot, lion": Case(TWO, snapshot, settings={"optimizer.kind": "lion"}),  # has no numbers that the host reads
    "offload": Case({**HOST_KEPT, "layers": 3}, host_kept),
    "states away": Case(TWO, stream_states, settings={"optimizer.offload": "states"}),
    "masters away": Case({**TWO, "zero": 1}, stream_states, settings={"optimizer.offload": "states+masters"}),
    "generation, 1d": Case({"tensor": "1d", **T}, write),
    "generation, zero=3": Case({**TWO, "zero": 3}, write),
    "generation, zero=1": Case({**TWO, "zero": 1}, write_after),
    "forming": Case({**PAIR, "layers": 1}, form),
    "rows in 8 bits, 1d": Case({"tensor": "1d", **T}, settings={"quantise.scale": "row"}),  # whose ranks take maxima
}
MORE = {
    "zero=3, 1d": Case({**TWO, **T, "zero": 3, "tensor": "1d"}),
    "zero=2 of groups": Case({"data": 4, "zero": 2, "zero_group": 2, "microbatch": 1}),
    "zero=3 of groups": Case({"data": 4, "zero": 3, "zero_group": 2, "microbatch": 1}),
    "zero=3, nothing ahead": Case({**TWO, "zero": 3}, settings={"parallel.overlap": False}),
    "2d": Case({"tensor": "2d", **RC}),
    "2d_gather": Case({"tensor": "2d_gather", **RC}, model="gpt_untied"),
    "2d_gather, again": Case({"tensor": "2d_gather", "gathered": "again", "recompute": "full", **RC}),
    "3d": Case({"tensor": "3d", **XYZ}),
    "3d, again": Case({"tensor": "3d", "gathered": "again", **XYZ}, model="llama"),
    "2p5d": Case({"tensor": "2p5d", "axes": {"d": 2, "r": 2, "c": 2}}),
    "dsp": Case({"branch": "dsp", "branch_axes": {"g": 2}}),
    "dsp_slice": Case({"branch": "dsp_slice", "branch_axes": {"g": 2}}, model="t5"),
    "d_model": Case({"tensor": "layout", "axes": {"p": 2}, "rules": {"d_model": ["p"]}}),
    "d_model, llama": Case({"tensor": "layout", "axes": {"p": 2}, "rules": {"d_model": ["p"]}}, model="llama"),
    "zero=3, timeline": Case({**TWO, "zero": 3}, settings={"monitor.timeline": True}),
    "zb_h1": Case({**PAIR, "pipeline": "zb_h1", "tensor": "1d", "axes": {"t": 2}}, rank=2),
    "1f1b, 1d_sp, zero=3": Case({**PAIR, "tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "zero": 3}),
    "recompute": Case({**TWO, **T, "tensor": "1d_sp", "zero": 3, "recompute": "full"}),
    "offload, 1d, 1f1b": Case({**PAIR, **T, **HOST_KEPT, "layers": 4, "tensor": "1d"}, host_kept),
    "offload, t5, zero=3": Case({**TWO, **HOST_KEPT, "zero": 3}, host_kept, model="t5"),
    "adafactor": Case({**TWO, **T, "tensor": "1d", "zero": 1}, settings={"optimizer.kind": "adafactor"}),
    "muon": Case({**TWO, **T, "tensor": "1d", "zero": 1}, settings={"optimizer.kind": "muon"}),
    "zero=1, timeline": Case({**TWO, "zero": 1}, settings={"monitor.timeline": True}),
    "zero=1, 1f1b": Case({**PAIR, "data": 2, "zero": 1}),
    "zero=1, 2d_gather": Case({"tensor": "2d_gather", **RC, "data": 2, "zero": 1}, model="gpt_untied"),
    "zero=2 of groups, nothing ahead": Case(
        {"data": 4, "zero": 2, "zero_group": 2, "microbatch": 1}, settings={"parallel.overlap": False}
    ),
    "averages": Case({**TWO, "zero": 1}, settings={"train.ema": 0.9, "eval.averaged": True}),
    "states away, averages": Case(
        {**TWO, "zero": 3}, stream_states,
        settings={"optimizer.offload": "states", "optimizer.masters": "split", "train.ema": 0.9, "eval.averaged": True},
    ),
    "masters away, averages": Case(
        TWO, stream_states, settings={"optimizer.offload": "states+masters", "train.ema": 0.9, "eval.averaged": True}
    ),
    "tensors in 8 bits, 3d": Case({"tensor": "3d", **XYZ}, settings={"quantise.scale": "tensor"}),
    "blocks in 8 bits, zero=3": Case(  # of the last stage: an embedding's gather would be waited for before the maxima
        {**PAIR, "data": 2, "zero": 3}, rank=2, settings={"quantise.scale": "block", "quantise.block": 8}
    ),
    "snapshot, zero=1": Case({**TWO, "zero": 1}, snapshot),
    "generation, last stage": Case(PAIR, write, rank=1),
    "comparison": Case({**TWO, "zero": 1}, compare),
    "ring": Case({"context": 4, "context_kind": "ring"}, model="llama"),
    "dropless experts": Case({**TWO, "experts_of": 2}, model="gpt_oss"),
    "rows in pairs": Case({**TWO, **PAIRED}, model="gpt_oss"),
    "pairs, 1f1b": Case({**PAIR, **PAIRED, "data": 2, "global_batch": 8}, model="experts"),
    "lent experts": Case({**TWO, "experts_of": 2}, lend, model="gpt_oss", settings=LENT),
    "distill, 1d": Case({"tensor": "1d", **T}, settings={"train.loss": "distill", "train.teacher": "none is read"}),
    "preferences, context": Case(
        {"context": 2, "layers": 1}, model="llama", settings={"train.loss": "dpo", "data.kind": "preferences"}
    ),
    "qlora, zero=3": Case(
        {**TWO, "zero": 3, "layers": 2}, model="llama", settings={"tune.kind": "qlora", "tune.rank": 4}
    ),
    "generation, context": Case({"context": 2, "layers": 1}, write_long, model="llama"),
}  # fmt: skip

# Waits that order nothing
HELD = "what is sent is not written to, and the transport holds it until it is"
IDLE = {
    "PipelineExecutor.run_row: self._sending.popleft().wait()": HELD,
    "PipelineExecutor._send_activations: self._sending.popleft().wait()": f"{HELD}; it limits how much memory that is",
    "Communicator._send_rank: self.send(torch.full((1,), float(self.rank), device=self.device), stage).wait()": HELD,
    "SectionClock.note_launch: wait()": "a time of a timeline alone is taken behind it",
    "HostBuffer.start_copy: stream.wait_event(after)": "the host has waited for that update, to read its step's times",
    "RankSnapshots.finish_snapshot: self._begun.copied()": "for the clock: the "
    "thread that is waited for next has waited for it",
}


@contextmanager
def followed(recorder: Recorder, case: Case) -> Iterator[tuple[Trainer, pytest.MonkeyPatch]]:
    c = configure(**{"precision": "bf16", **MODELS[case.model], **case.plan})
    for key, value in case.settings.items():
        group, _, name = key.partition(".")
        setattr(getattr(c, group), name, value)
    c.parallel.bucket_mib = 0  # a bucket for each span, as large models have
    with recorded(c, case.rank, recorder) as trainer, pytest.MonkeyPatch.context() as patch:
        yield trainer, patch


@cache
def nccl_is_first() -> bool:
    """Whether the runtime asks for streams of high priority for groups."""
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
        patch.setattr(dist, "init_process_group", lambda *_, pg_options, **__: asked.append(pg_options))
        patch.setattr(dist, "group", MagicMock())
        join_default_group(dist.HashStore(), 0, 1, "cuda")
    return asked[0].is_high_priority_stream


@cache
def notes(name: str) -> Sequence[Note]:
    """What a case has launched, waited for and freed."""
    case, recorder = (CASES | MORE)[name], Recorder(nccl_is_first())
    with followed(recorder, case) as (trainer, patch):
        case.run(trainer, patch)
    return recorder.notes


RUN = CASES | MORE if suite.full else CASES
EVERY = [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]


@pytest.mark.counted("plans whose streams are followed", len(RUN), len(CASES | MORE))
@pytest.mark.parametrize("name", EVERY)
def test_no_two_streams_race(name):
    noted = notes(name)
    assert any(isinstance(note, Work) for note in noted)
    assert not races(noted)
    assert not shared(noted)


@pytest.mark.counted("plans without each of their waits", len(RUN), len(CASES | MORE))
@pytest.mark.parametrize("names", [CASES, pytest.param(CASES | MORE, marks=pytest.mark.full)], ids=["few", "all"])
def test_negative_control_a_wait_that_is_taken_away_is_found(names):
    """A wait may be covered by another one under one plan, but not under all."""
    of = {name: set(waits(notes(name))) for name in names}
    shortest = sorted(names, key=lambda name: len(notes(name)))  # which needs a wait is enough: the first that does
    sites = set().union(*of.values())
    needed = {s for s in sites if any(s in of[name] and races(notes(name), without=s) for name in shortest)}
    assert {f"{site.function}: {site.call}" for site in sites - needed} == IDLE.keys()


@pytest.mark.full
@pytest.mark.parametrize("name", ["passes in pairs", "rows in pairs", "pairs, 1f1b"])
def test_negative_control_an_exchange_in_a_pair_that_is_not_waited_for(name):
    """Another pass computes meanwhile, in the same stream: that is no wait."""
    noted = notes(name)
    exchanges = [s for s in waits(noted) if s.file.endswith(("conversion.py", "expert_rows.py"))]
    assert exchanges and all(races(noted, without=site) for site in exchanges), exchanges


TOO_EARLY = {
    "zero=1": (ParameterResidency, "_move_to_span", lambda *_: None),
    "generation, zero=1": (ParameterResidency, "_move_to_span", lambda *_: None),
    "zero=1, 2d_gather": (rank_parameters, "first_reads_by_span", lambda chunk: [set(names) for names in chunk.spans]),
    "comparison": (RankWeights, "wait_for_gathers", lambda self: None),
    "averages": (RankWeights, "wait_for_gathers", lambda self: None),
}


@pytest.mark.parametrize("name", TOO_EARLY)
def test_negative_control_weights_that_are_read_while_they_are_gathered(name):
    """Each of those who wait for what an update has begun to gather."""
    case = (CASES | MORE)[name]
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(*TOO_EARLY[name])
        with followed(recorder := Recorder(), case) as (trainer, patch):
            case.run(trainer, patch)
    assert any("all_gather" in race for race in races(recorder.notes))


def test_negative_control_a_snapshot_in_the_stream_of_a_group():
    """A new stream for each snapshot, from the pool that groups take theirs from: of every 32 one is a group's."""

    def snapshots(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(buffer, "_stream_of_copies", buffer._stream_of_copies.__wrapped__)
        worker = worker_of(trainer, patch)
        worker.step(1)
        for step in range(POOL):
            worker.take_snapshot(step)

    for high in (True, False):
        with followed(recorder := Recorder(high), CASES["snapshot, lion"]) as (trainer, patch):
            snapshots(trainer, patch)
        assert bool(shared(recorder.notes)) is not high
    assert "_foreach_copy_" in shared(recorder.notes)[0] and nccl_is_first()


def test_negative_control_a_timeline_that_does_not_hold_what_its_collectives_read():
    """They are waited for in a stream of its own, upon which the transport lets go of their memory."""
    case = CASES["timeline"]
    with followed(recorder := Recorder(), case) as (trainer, patch):
        patch.setattr(
            clock, "Flight", lambda what, begin, done, held, build=clock.Flight: build(what, begin, done, None)
        )
        case.run(trainer, patch)
    assert any(race.startswith("free") for race in races(recorder.notes))


@contextmanager
def card() -> Iterator[Recorder]:
    """Streams of the card, without a runtime."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), recorder:
        recorder.stand_in(patch)
        yield recorder


def test_an_update_is_launched_before_anything_is_read():
    """Of the step, and its new compute copies and gathers too; with optimizer.early=off nothing is."""
    for early, settings in ((True, {}), (False, {"optimizer.early": "off"})):
        with followed(recorder := Recorder(), Case({**TWO, "zero": 1}, settings=settings)) as (trainer, _):
            trainer.step(1)
        launched = [note.what for note in recorder.notes if isinstance(note, Work)]
        update = next(i for i, what in enumerate(launched) if what.startswith("_fused_adamw"))
        gather = next(i for i, what in enumerate(launched) if what == "all_gather" and i > update)
        assert (update < gather < launched.index("read")) == early and launched.count("read") == 1


def beside(work: Callable[[torch.Tensor], object], *, before: bool = True, after: str = "") -> list[str]:
    """What races where a second stream does `work` on a tensor that the first has made and will change. `before`: it
    waits for the first; `after`: how the first waits for it."""
    with card() as recorder:
        x, other = torch.ones(4, device=CARD), torch.cuda.Stream()
        if before:
            other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            work(x)
            event = torch.cuda.Event()
            event.record()
        if after == "stream":
            torch.cuda.current_stream().wait_stream(other)
        elif after == "event":
            event.wait()
        elif after:
            {"host": event, "device": torch.cuda}[after].synchronize()
        x.add_(1)
    return races(recorder.notes)


@pytest.mark.parametrize("work", [lambda x: x + 1, lambda x: x.add_(1), lambda x: x.view(2, 2)[0].sum()])
@pytest.mark.parametrize("after", ["stream", "event", "host", "device"])
def test_streams_that_wait_do_not_race_and_others_do(work, after):
    assert not beside(work, after=after)
    assert len(beside(work)) == len(beside(work, before=False, after=after)) == 1
    assert len(beside(work, before=False)) == 2


def test_two_streams_may_read():
    assert not beside(lambda x: x.view(-1), before=False), "a view launches nothing"
    with card() as recorder:
        x, other = torch.ones(4, device=CARD), torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        x + 1
        with torch.cuda.stream(other):
            x + 1
        x + 1
        assert not races(recorder.notes)


@pytest.mark.parametrize("how", ["freed", "resized", "recorded", "waited"])
def test_memory_that_is_freed_while_another_stream_uses_it(how):
    """Its own stream may use it again at once, unless it is told of the other."""
    with card() as recorder:
        x, other = torch.ones(4, device=CARD), torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            x + 1
        if how == "recorded":
            x.record_stream(other)
        elif how == "waited":
            torch.cuda.current_stream().wait_stream(other)
        elif how == "resized":
            x.untyped_storage().resize_(0)
        del x
        torch.ones(4, device=CARD)
    assert len(races(recorder.notes)) == (how in ("freed", "resized"))


def test_memory_that_is_not_there():
    with card() as recorder:
        x = torch.ones(4, device=CARD)
        x.untyped_storage().resize_(0)
        x.add_(1)
        assert "memory that is not there" in races(recorder.notes)[0]
        x.untyped_storage().resize_(16)
        count = len(recorder.notes)
        x.add_(1)
    assert not races(recorder.notes[count:])


def test_a_copy_to_the_host_is_read_too_early():
    with card() as recorder:
        x, host = torch.ones(4, device=CARD), torch.empty(4)
        host.copy_(x)
        recorder.on_host("look", [host], [])
        assert not races(recorder.notes)
        host.copy_(x, non_blocking=True)
        recorder.on_host("look", [host], [])
        assert len(races(recorder.notes)) == 1


WAITS = {"wait", "wait_stream", "wait_event", "synchronize", "advance_collective", "start_final_reduction", "copied"}
# Waits for a device that no case makes; those of gloo, and for what is no device, are not looked at
PASSED_ON = {"self._handle.wait()", "self.advance_collective()", "flat.start_final_reduction()"}
OF_THE_HOST = {
    "runtime/process_groups.py", "train/gauges.py",
    "runtime/host_memory.py", "checkpoint/saver.py",
}  # fmt: skip
COMPILED = "in a graph that torch compiles, which runs on no card"
BEFORE = "before a run: takes its time"
NEVER = "of the shipped schemes none moves the operands of panels"
ELSEWHERE = {
    "checkpoint/snapshots.py: futures.wait([begun.passed_on], ABANDONED)": "a thread whose transfer failed",
    'runtime/communicator.py: self.launch("all_reduce", flag, axes).wait()': "reads a number at once",
    "runtime/communicator.py: copied.synchronize()": "of numbers on CUDA alone, which the card reads at once",
    "runtime/communicator.py: handle.wait()": COMPILED,
    "runtime/chunked_loss.py: leaving.wait()": COMPILED,
    "runtime/chunked_loss.py: arriving.wait()": COMPILED,
    "runtime/products.py: c.wait()": NEVER,
    "runtime/products.py: leaving[i].wait()": NEVER,
    "runtime/traced_collectives.py: wait()": COMPILED,
    "runtime/traced_collectives.py: torch.ops.platform.wait(self._x, self._trace.last, *self._arguments)": COMPILED,
    "runtime/parallel_ops.py: left.wait()": "no pass of these leaves out an operation",
    "train/calibration_rates.py: communicator.launch(op, x, LINE).wait()": BEFORE,
    "train/calibration_rates.py: handle.wait()": BEFORE,
    'train/calibration_rates.py: communicator.launch("all_reduce", most_seconds, [*axes], reduce="max").wait()': BEFORE,
    "train/calibration_rates.py: (communicator.send(x, 1 - stage) if sends else "
    "communicator.receive(x.shape, x.dtype, 1 - stage)).wait()": BEFORE,
    "train/measurements.py: communicator.launch(op, block, (TOGETHER,)).wait()": "before a run: reads numbers",
    "train/measurements.py: torch.cuda.synchronize()": "before a run",
    "train/measurements.py: last.synchronize()": "before a run",
    "train/worker.py: futures.wait([self._written], seconds)": "a thread that writes",
    "train/worker.py: torch.cuda.synchronize()": "at the end of a generation",
}


def written() -> Iterator[tuple[str, int, str]]:
    """Every call in the runtime that may wait for a device: file, line, text."""
    for path in sorted(path for room in ("checkpoint", "runtime", "train") for path in (ROOT / room).rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in WAITS:
                call = " ".join(str(ast.get_source_segment(source, node)).split())
                if call not in PASSED_ON:
                    yield str(path.relative_to(ROOT)), node.lineno, call


@pytest.mark.full
def test_every_wait_is_made_in_some_case():
    waited = {(site.file, site.line, site.call) for name in CASES | MORE for site in waits(notes(name))}
    left = [(file, call) for file, line, call in written() if (file, line, call) not in waited]
    assert {f"{file}: {call}" for file, call in left if file not in OF_THE_HOST} == ELSEWHERE.keys()
