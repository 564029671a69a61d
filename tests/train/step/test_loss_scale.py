"""Training in float16: the numbers of fp32 within its digits, and a loss scale that all ranks change alike, that
checkpoints and snapshots keep, and that no other precision has."""

from __future__ import annotations

from math import inf, isfinite, nan
from typing import Any

import pytest
import torch

from platform.boundary import schema
from platform.boundary.schema import Malformed
from platform.boundary.storage import open_storage
from platform.checkpoint.blocks import join_chains
from platform.checkpoint.catalogue import choose_attempt_directory, commit_checkpoint, load_manifest
from platform.checkpoint.manifest import Meta, Refused
from platform.config.fields import Config, LossScaling
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.train.rank_parameters import LARGEST, LossScale
from platform.train.training_state import RankTrainingState
from tests.harness.memories import opened, take
from tests.harness.oracle import assemble, configure, run, serial, trainer_of
from tests.harness.threads import run_threads

PLANS: dict[str, dict[str, Any]] = {
    "serial": {},
    "data": {"data": 2},
    "zero 1": {"data": 2, "zero": 1},
    "1d, zero 3": {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "zero": 3},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 2}},
    "pipeline": {"pipeline": "1f1b", "stages": 2, "microbatch": 2},
}


def case(name: str, precision: str = "fp16", **scaling: float) -> Config:
    c = configure(**PLANS[name], precision=precision)
    c.loss_scale = LossScaling(**scaling)
    return c


def on_all_ranks(c: Config, work) -> list:
    """`work(trainer)` on every rank."""
    plan = make_plan(c)

    def start(communicator):
        torch.set_num_threads(1)
        return work(trainer_of(c, plan, communicator))

    return [start(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, start)


def unscaled(name: str, scale: float, **scaling: float) -> tuple[Any, list]:
    """Plan and results of three steps in fp16, gradients divided by the scale."""
    c = case(name, initial=scale, **scaling)
    plan, results = run(c)
    for r in results:
        r.gradients = {n: g / scale for n, g in r.gradients.items()}
    return plan, results


@pytest.mark.parametrize("name", PLANS)
def test_float16_trains_as_one_process_in_fp64_does(name):
    """Within what rounding to 11 bits leaves, gradients compared: AdamW would hide their scale."""
    exact = serial(case("serial"))
    plan, results = unscaled(name, 1024.0)
    largest = max(g.abs().max().item() for g in exact.gradients.values())
    first: dict[Any, torch.Tensor] = {}
    for r in results:  # replicas are equal as far as float16 goes: the first stands for all
        for p in plan.parameters if not plan.sharded else ():
            where = p.name, tuple(map(tuple, plan.locate_block(p, plan.mesh.rank_coordinates(r.rank))))
            if p.name in r.gradients:
                r.gradients[p.name] = first.setdefault(where, r.gradients[p.name])
    for tensor, value in assemble(plan, results, lambda r: r.gradients).items():
        wanted = exact.gradients[tensor]
        error = (value - wanted).norm().item()
        assert error <= 5e-3 * wanted.norm().item() + 2e-4 * largest, (tensor, error)
    for r in results:
        assert r.losses == pytest.approx(exact.losses, rel=3e-3)
        assert r.grad_norm == pytest.approx(exact.grad_norm, rel=3e-3)
    assert results[0].losses[0] != exact.losses[0]


def test_negative_control_without_a_scale_small_gradients_vanish():
    """A loss of 1e-4: in float16 most of its gradient is nothing, unless it is scaled."""

    def gradients(scale: float) -> float:
        def work(trainer):
            corpus = trainer.corpus.predicted
            trainer.corpus.predicted = lambda *span: 2**20 * corpus(*span)
            trainer.compute_gradients(1)
            return sum((g == 0).sum().item() for g in trainer.weights.gradients.values())

        return on_all_ranks(case("serial", initial=scale), work)[0]

    assert gradients(1.0) > 10 * gradients(2.0**20)


@pytest.mark.parametrize("name", ["serial", "1d, zero 3", "pipeline"])
def test_an_overflow_skips_the_step_on_all_ranks_and_the_scale_falls(name):
    """Until it fits; then training goes on, and the scale rises again after as many updates as asked."""
    c = case(name, initial=2.0**40, backoff=2.0**-14, growth=4.0, growth_every=2)

    def work(trainer):
        before = {n: w.detach().clone() for n, w in trainer.weights.master.items()}
        reports = [trainer.step(k) for k in (1, 2)]
        same = all(torch.equal(w, before[n]) for n, w in trainer.weights.master.items())
        reports += [trainer.step(k) for k in (3, 4, 5)]
        changed = any(not torch.equal(w, before[n]) for n, w in trainer.weights.master.items())
        return [(r.skipped, r.overflowed, isfinite(r.grad_norm), r.loss_scale) for r in reports], same, changed

    scales = [2.0**40, 2.0**26, 2.0**12, 2.0**12, 2.0**14]
    for told, same, changed in on_all_ranks(c, work):
        assert told == [(k < 2, k < 2, k >= 2, scale) for k, scale in enumerate(scales)]
        assert same and changed


def test_what_a_smaller_scale_does_not_cure_is_no_overflow():
    """A loss that is not finite, or a scale that is at its least."""
    rules = LossScaling(initial=2.0**40, least=2.0**40)

    def work(trainer):
        report = trainer.step(1)
        return report.skipped, report.overflowed, trainer.loss_scale

    c = case("serial")
    c.loss_scale = rules
    assert on_all_ranks(c, work) == [(True, False, LossScale(2.0**40))]
    assert not LossScale(8.0).has_overflowed(nan, inf, LossScaling())
    assert LossScale(8.0).has_overflowed(1.0, nan, LossScaling())
    assert not LossScale(1.0).has_overflowed(1.0, nan, LossScaling())


def test_only_float16_has_a_scale():
    (report,) = on_all_ranks(case("serial", "bf16", initial=2.0**40), lambda trainer: trainer.step(1))
    assert report.loss_scale is None and not report.skipped


def test_the_scale_stays_in_its_bounds():
    rules = LossScaling(growth_every=1)
    assert LossScale(LARGEST).scale_after_update(rules) == LossScale(LARGEST)
    assert LossScale(1.5).scale_after_overflow(rules) == LossScale(1.0)
    for wrong in ({"scale": 0.0}, {"scale": inf}, {"good_steps": 3}, {"scale": 1.0, "good_steps": -1}, [1.0]):
        with pytest.raises(Malformed):
            schema.parse_value(LossScale, wrong)


def saved(storage, c: Config, steps: int) -> str:
    """A checkpoint after so many steps of one process."""

    def work(trainer):
        state = RankTrainingState(trainer)
        for step in range(1, steps + 1):
            trainer.step(step)
        state.checkpoint_image.fill_parts(state.live_blocks())
        directory = choose_attempt_directory(storage, steps)
        shapes = {h.name: h.shape for h in state.held}
        meta = Meta(steps, 8 * steps, c.seed, "", {}, "", {}, state.read_values())
        commit_checkpoint(storage, directory, shapes, [state.checkpoint_image.write_file(storage, directory)], meta)
        return directory

    return on_all_ranks(c, work)[0]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_resumed_run_has_the_same_scale(tmp_path, steps):
    """Under any plan, also where no update was made before the checkpoint: the next step is that of one go."""
    scaling = {"initial": 2.0**40, "backoff": 2.0**-14, "growth_every": 7}
    storage, c = open_storage(str(tmp_path)), case("serial", **scaling)
    directory = saved(storage, c, steps)
    manifest = load_manifest(storage, directory)
    at, good = {1: (2.0**26, 0), 3: (2.0**12, 1)}[steps]
    assert manifest.meta.values["loss_scale"] == {"scale": at, "good_steps": good}

    def through(trainer):
        return [trainer.step(step) for step in range(1, steps + 3)][-1]

    def second(trainer):
        RankTrainingState(trainer).restore_checkpoint(storage, directory, manifest)
        assert trainer.loss_scale == LossScale(at, good)
        return [trainer.step(step) for step in (steps + 1, steps + 2)][-1]

    (wanted,) = on_all_ranks(c, through)
    for actual in [*on_all_ranks(c, second), *on_all_ranks(case("zero 1", **scaling), second)]:
        assert actual.loss_scale == wanted.loss_scale and actual.loss == pytest.approx(wanted.loss, rel=2e-3)


def test_between_precisions(tmp_path):
    """An fp32 run goes on in fp16 with the first scale, and back; a scale that is none is refused."""
    storage = open_storage(str(tmp_path))

    def losses(c: Config, directory: str) -> list[float]:
        manifest = load_manifest(storage, directory)

        def work(trainer):
            RankTrainingState(trainer).restore_checkpoint(storage, directory, manifest)
            scale = LossScale(4096.0, 1 if directory == second else 0)
            assert trainer.loss_scale == (scale if c.precision == "fp16" else None)
            return trainer.step(2).loss

        return on_all_ranks(c, work)

    wide, half = (case("serial", precision, initial=4096.0) for precision in ("fp32", "fp16"))
    first, second = saved(storage, wide, 1), saved(storage, half, 1)
    for directory in (first, second):
        assert losses(wide, directory) == [pytest.approx(losses(half, directory)[0], rel=3e-3)]
    manifest = load_manifest(storage, second)
    manifest.meta.values["loss_scale"] = {"scale": -1.0}
    with pytest.raises(Refused, match="the values of its loss scale: scale: -1.0 is not in"):
        on_all_ranks(half, lambda trainer: RankTrainingState(trainer).restore_checkpoint(storage, second, manifest))


def test_memory_keeps_the_scale():
    """Of a state that no update has made yet, too."""
    c = case("data", initial=2.0**40, backoff=2.0**-14)

    def work(trainer):
        state, communicator = RankTrainingState(trainer), trainer.communicator
        memory = opened(state.held, ["a", "b"], communicator)
        trainer.step(1)
        take(memory, 1, state.live_blocks(), state.read_values(), communicator.transfer)
        fresh = trainer_of(c, trainer.plan, communicator)
        RankTrainingState(fresh).recover_state(join_chains(state.held), memory.open_node_snapshot(1))
        assert fresh.loss_scale == LossScale(2.0**26)
        return [(fresh.step(k).loss, trainer.step(k).loss) for k in (2, 3, 4)]

    for pairs in on_all_ranks(c, work):
        assert all(mine == theirs for mine, theirs in pairs)
