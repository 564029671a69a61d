"""A step, a checkpoint, and a step under the same plan or another: what two steps in one go give."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from platform.boundary.storage import open_storage
from platform.checkpoint.blocks import Block, Box
from platform.checkpoint.catalogue import choose_attempt_directory, commit_checkpoint, load_manifest
from platform.checkpoint.manifest import Meta
from platform.config.fields import Config
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator, SingleRank
from platform.train.training_state import RankTrainingState
from tests.harness.oracle import configure, trainer_of
from tests.harness.threads import run_threads

COMMON = {"kv_heads": 4, "vocab": 61, "global_batch": 4, "microbatch": 2, "dropout": 0.1, "layers": 4}
PLANS: dict[str, dict[str, Any]] = {
    "serial": {},
    "data 3, zero 1": {"data": 3, "zero": 1},
    "1d, data 2, zero 3": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 3},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
    "dsp": {"branch": "dsp", "branch_axes": {"g": 2}},
    "dsp_csub, data 2": {"branch": "dsp_csub", "branch_axes": {"g": 2}, "data": 2},
    "1f1b, zero 1": {"pipeline": "1f1b", "stages": 2, "data": 2, "zero": 1},
    "interleaved, v = 2": {"pipeline": "interleaved", "stages": 2, "chunks": 2, "tensor": "1d", "axes": {"t": 2}},
    "interleaved, v = 3": {"pipeline": "interleaved", "stages": 2, "chunks": 3},
}
NAMES = list(PLANS)
PAIRS = [(a, b) for a in NAMES for b in NAMES if a != b]
RING = list(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))
REST = [pair for pair in PAIRS if pair not in RING]
MOMENTS = {"": ["exp_avg", "exp_avg_sq"], "adafactor": ["variance", "row_var", "col_var"]}
FACTORED = [f"{name} by adafactor" for name in ("dsp_csub, data 2", "1d, data 2, zero 3", "1f1b, zero 1", "3d")]
ROUTED = {  # what two replicas share, and what more do: shards over two sets of axes
    "experts of 4, zero 3": {"data": 4, "experts_of": 4, "zero": 3, "microbatch": 1},
    "experts of 2, data 4, zero 1": {"data": 4, "experts_of": 2, "zero": 1, "microbatch": 1},
    "experts of 2, 1d, 1f1b, zero 2": {"tensor": "1d", "axes": {"t": 2}, "pipeline": "1f1b", "stages": 2, "data": 2,
                                       "experts_of": 2, "zero": 2, "microbatch": 1},
}  # fmt: skip
EXPERTS = {"experts": 4, "expert_d_ff": 16, "shared_experts": 1, "router_bias": True, "balance_rate": 0.2,
           "balance_over": "batch", "balance_loss": 0.3}  # fmt: skip
PLANS |= {name: {**plan, **EXPERTS} for name, plan in ROUTED.items()}
ROUTES = list(zip(ROUTED, [*ROUTED][1:] + [*ROUTED][:1], strict=True))
SAME = ["serial", "1d, data 2, zero 3", "dsp_csub, data 2", "interleaved, v = 3"]


@dataclass
class Part:
    """What a rank had before its steps, and after each: copies of its blocks, and loss and gradient norm."""

    restored: list[Block] = field(default_factory=list)
    after: list[list[Block]] = field(default_factory=list)
    numbers: list[tuple[float, float]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


def copies(state: RankTrainingState) -> list[Block]:
    return [Block(name, box, tensor.clone()) for name, box, tensor in state.live_blocks()]


class Runs:
    """Two steps under each plan with a checkpoint after the first, and second steps that go on from one."""

    def __init__(self, folder: Path):
        self.storage = open_storage(str(folder))
        self._made: dict[str, tuple[str, list[Part]]] = {}

    def through(self, name: str) -> tuple[str, list[Part]]:
        if name not in self._made:
            c, directory, reports, shapes = config(name), choose_attempt_directory(self.storage, 1), [], {}

            def work(state: RankTrainingState, part: Part, trainer) -> None:
                for step in (1, 2):
                    report = trainer.step(step)
                    part.numbers.append((report.loss, report.grad_norm))
                    part.after.append(copies(state))
                    if step == 1:
                        part.values = state.read_values()
                        state.checkpoint_image.fill_parts(state.live_blocks())
                        reports.append(state.checkpoint_image.write_file(self.storage, directory))
                        shapes.update({h.name: h.shape for h in state.held})

            parts = ranks(c, work)
            commit_checkpoint(
                self.storage, directory, shapes, reports, Meta(1, 4, c.seed, "", {}, "", {}, parts[0].values)
            )
            self._made[name] = directory, parts
        return self._made[name]

    def second(self, name: str, directory: str, forget: str = "") -> list[Part]:
        """`forget`: a kind of tensor that is lost on the way."""
        manifest = load_manifest(self.storage, directory)

        def work(state: RankTrainingState, part: Part, trainer) -> None:
            state.restore_checkpoint(self.storage, directory, manifest)
            part.restored, part.values = copies(state), state.read_values()
            for block in state.live_blocks():
                if block.name.split(".")[0] == forget:
                    block.tensor.zero_()
            report = trainer.step(2)
            part.numbers.append((report.loss, report.grad_norm))
            part.after.append(copies(state))

        return ranks(config(name), work)

    def shapes(self, directory: str) -> dict[str, tuple[int, ...]]:
        return {name: t.shape for name, t in load_manifest(self.storage, directory).tensors.items()}


def ranks(c: Config, work) -> list[Part]:
    plan = make_plan(c)

    def one(communicator: Communicator) -> Part:
        torch.set_num_threads(1)
        trainer, part = trainer_of(c, plan, communicator), Part()
        work(RankTrainingState(trainer), part, trainer)
        return part

    return [one(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, one)


def whole(blocks_of_ranks: list[list[Block]], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Global tensors. Raises AssertionError where replicas differ or something is missing."""
    out = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items()}
    for name, box, tensor in (block for blocks in blocks_of_ranks for block in blocks):
        everything = Box.whole_tensor(shapes[name])
        if real := box.intersect_box(everything):
            mine, assembled = tensor[real.relative_slices(box)], out[name][real.relative_slices(everything)]
            assert assembled.isnan().all() or torch.allclose(assembled, mine, rtol=1e-10, atol=1e-14), (
                f"replicas of {name}"
            )
            assembled.copy_(mine)
    assert not any(t.isnan().any() for t in out.values())
    return out


def config(name: str) -> Config:
    """Of a plan, or of "PLAN by OPTIMIZER"."""
    plan, _, optimizer = name.partition(" by ")
    c = configure(**{**COMMON, **PLANS[plan]})
    if optimizer:
        c.optimizer.kind, c.optimizer.eps = optimizer, 1e-6
    return c


def moments(name: str) -> list[str]:
    return MOMENTS[name.partition(" by ")[2]] + ["state"] * (name in ROUTED)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("saved"))


def same(runs: Runs, name: str) -> None:
    directory, through = runs.through(name)
    for mine, theirs in zip(runs.second(name, directory), through, strict=True):
        assert mine.values == theirs.values
        assert mine.numbers == theirs.numbers[1:]
        for have, want in ((mine.restored, theirs.after[0]), (mine.after[0], theirs.after[1])):
            assert [b[:2] for b in have] == [b[:2] for b in want]
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(have, want, strict=True))


def other(runs: Runs, writer: str, reader: str, forget: str = "") -> None:
    directory, through = runs.through(writer)
    shapes = runs.shapes(directory)
    parts = runs.second(reader, directory, forget)
    assert {name.split(".")[0] for name in shapes} == {"model", *moments(writer)}
    stored = whole([part.after[0] for part in through], shapes)
    restored = whole([part.restored for part in parts], shapes)
    for name in shapes:
        assert torch.equal(stored[name], restored[name]), name
    assert parts[0].values == {"optimizer": {"step": 1.0}}
    for part in parts:
        assert part.numbers == [pytest.approx(through[0].numbers[1], rel=1e-10, abs=0)]
    after, wanted = (whole([part.after[-1] for part in run], shapes) for run in (parts, through))
    for name in shapes:
        bound = 1e-10 * wanted[name].abs().max() + (1e-10 * 1e-2 if name.startswith("model.") else 1e-14)
        assert (after[name] - wanted[name]).abs().max() <= bound, name


@pytest.mark.parametrize("name", SAME)
def test_the_same_plan_goes_on_bit_by_bit(runs, name):
    same(runs, name)


@pytest.mark.parametrize("pair", RING, ids=" -> ".join)
def test_another_plan_goes_on_with_the_same_numbers(runs, pair, record_count):
    record_count("training continued under another plan", len(RING[::2]), len(PAIRS))
    other(runs, *pair)


@pytest.mark.parametrize("pair", ROUTES, ids=" -> ".join)
def test_so_do_experts(runs, pair):
    other(runs, *pair)


@pytest.mark.parametrize("forget", ["model", "exp_avg", "exp_avg_sq"])
def test_negative_control_what_is_forgotten_shows(runs, forget):
    with pytest.raises(AssertionError):
        other(runs, "serial", "dsp", forget)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [FACTORED[:2], *(pytest.param(*pair, marks=pytest.mark.full) for pair in (FACTORED[1:3], FACTORED[2:]))],
)
def test_statistics_of_rows_and_columns_go_with_them(runs, writer, reader):
    other(runs, writer, reader)


def test_negative_control_forgotten_states_of_routers_show(runs):
    with pytest.raises(AssertionError):
        other(runs, *ROUTES[0], "state")


@pytest.mark.parametrize("forget", MOMENTS["adafactor"])
def test_negative_control_forgotten_statistics_show(runs, forget):
    with pytest.raises(AssertionError):
        other(runs, *FACTORED[:2], forget)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in NAMES if name not in SAME])
def test_the_rest_go_on_bit_by_bit(runs, name):
    same(runs, name)


@pytest.mark.full
@pytest.mark.parametrize(("writer", "reader"), REST, ids=map(" -> ".join, REST))
def test_the_rest_of_the_pairs(runs, writer, reader):
    other(runs, writer, reader)
