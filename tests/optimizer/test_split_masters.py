"""Masters as bf16 weights and 16 bits: exactly the fp32 numbers, and the training of these, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from platform.boundary.refusals import ConfigError
from platform.boundary.storage import open_storage
from platform.config.fields import Config
from platform.optimizer.optimizers import count_states_per_element
from platform.predict.footprint import weight_bytes
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.runtime.flat_buffers import FlatBucket, join_halves, split_halves
from platform.train.training_state import RankTrainingState
from tests.harness.oracle import configure, trainer_of, validation_loss
from tests.harness.threads import run_threads
from tests.optimizer.test_stored_resume import restored, saved

PLANS = {
    "serial": {},
    "1d": {"tensor": "1d", "axes": {"t": 2}, "data": 2},
    "zero1": {"data": 2, "zero": 1},
    "zero2": {"data": 2, "zero": 2},
    "zero3": {"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 3},
    "stages": {"pipeline": "1f1b", "stages": 2, "microbatch": 2, "data": 2, "zero": 1},
}
EDGES = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x18000, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0x7FC00000,
         0x80000000, 0x80008000, 0xFF7FFFFF, 0xFF800000]  # fmt: skip


def configured(masters: str = "split", plan: str = "serial", **more) -> Config:
    c = configure(**{"precision": "bf16", "tied": False, **PLANS[plan]})
    c.optimizer.masters, c.optimizer.clip = masters, 0.5
    for name, value in more.items():
        setattr(c.optimizer, name, value)
    return c


def test_two_halves_are_the_number():
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=draw, dtype=torch.int64)
    bits = torch.cat([torch.tensor(EDGES), drawn]).to(torch.int32)
    x = bits.view(torch.float32)
    high, low = torch.empty(len(x), dtype=torch.bfloat16), torch.empty(len(x), dtype=torch.int16)
    split_halves(x, high, low)
    assert torch.equal(join_halves(high, low).view(torch.int32), bits)
    tie = (bits & 0xFFFF) == 0x8000  # torch rounds these to the even neighbour, and all others alike
    alike = (high == x.bfloat16()) | x.isnan() | tie
    assert alike.all() and (high != x.bfloat16())[tie].any()
    assert not torch.equal(join_halves(high, low.roll(1)).view(torch.int32), bits), "a low half of another number"


def round_alike(monkeypatch) -> None:
    """Has compute copies of fp32 masters round halves away from zero too, as NVIDIA's remainders do."""

    def rounded(x: Tensor) -> Tensor:
        high = torch.empty_like(x, dtype=torch.bfloat16)
        split_halves(x.detach(), high, torch.empty_like(x, dtype=torch.int16))
        return high

    fill, refresh = FlatBucket.fill_parameter, FlatBucket.refresh_compute_copies

    def filled(self, name, block):
        fill(self, name, block)
        if self.low is None and self.bucket.frees_weights:
            self.part.copy_(rounded(self.masters))
        elif self.low is None:
            self.compute[name].detach().copy_(rounded(block))

    def refreshed(self):
        if self.low is not None:
            return refresh(self)
        masters, self.masters = self.masters, rounded(self.masters)
        try:
            refresh(self)
        finally:
            self.masters = masters

    monkeypatch.setattr(FlatBucket, "fill_parameter", filled)
    monkeypatch.setattr(FlatBucket, "refresh_compute_copies", refreshed)


def trained(c: Config, steps: int = 3) -> list[tuple[dict[str, Tensor], list[float], int, int]]:
    """Per rank: whole numbers and states after steps, losses and an evaluation by averages, bytes and those planned."""
    plan = make_plan(c)

    def on_rank(communicator):
        torch.set_num_threads(1)
        trainer = trainer_of(c, plan, communicator)
        losses = [trainer.step(k).loss for k in range(1, steps + 1)]
        weights = trainer.weights
        tensors = {f"model.{n}": weights.read_master(n).clone() for n in weights.own_masters}
        tensors |= {f"ema.{n}": w.clone() for n, w in weights.averages.items()}
        for n in weights.trainable_masters:
            states = trainer.optimizer.state[weights.updated[n][0]].items()
            tensors |= {
                f"{k}.{n}": weights.part_of_parameter(n, v).clone() for k, v in states if v.dim() and "_scale" not in k
            }
        if c.train.ema:
            losses.append(validation_loss(trainer))
            assert all(torch.equal(tensors[f"model.{n}"], weights.read_master(n)) for n in weights.own_masters)
        state = RankTrainingState(trainer)
        kept = sum(b.tensor.nbytes for b in state.live_blocks() if b.name.startswith(("model.", "low.")))
        planned = weight_bytes(trainer.stage, count_states_per_element(c), communicator.coordinates)["parameters"]
        return tensors, losses, kept, planned

    return [on_rank(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, on_rank)


@pytest.mark.parametrize("plan", PLANS)
def test_it_is_the_training_of_fp32_masters(plan, monkeypatch):
    """With clipped gradients and moving averages, in every bit, and for two bytes of a parameter less."""
    round_alike(monkeypatch)
    split, wide = configured("split", plan), configured("fp32", plan)
    for c in (split, wide):
        c.train.ema, c.eval.averaged, c.eval.batches = 0.75, True, 1
    for ours, theirs in zip(trained(split), trained(wide), strict=True):
        assert ours[0].keys() == theirs[0].keys() and ours[1] == theirs[1]
        assert all(torch.equal(x, theirs[0][name]) for name, x in ours[0].items())
        assert ours[2] == theirs[2] and theirs[3] - ours[3] >= ours[2] // 2


@pytest.mark.parametrize("kind, moments", [("lion", "fp32"), ("sgd", "fp32"), ("adamw", "int8"), ("lion", "bf16")])
def test_with_other_optimizers_and_moments(kind, moments, monkeypatch):
    round_alike(monkeypatch)
    split, wide = (configured(form, "zero1", kind=kind, moments=moments) for form in ("split", "fp32"))
    for ours, theirs in zip(trained(split), trained(wide), strict=True):
        assert all(torch.equal(x, theirs[0][name]) for name, x in ours[0].items()), (kind, moments)


def test_negative_control_a_low_half_of_another_number(monkeypatch):
    round_alike(monkeypatch)
    wide = trained(configured("fp32"))
    from platform.optimizer import stored_states

    monkeypatch.setattr(stored_states, "join_masters", lambda high, low: join_halves(high, low.roll(1)))
    [ours], [theirs] = trained(configured("split")), wide
    assert not all(torch.equal(x, theirs[0][name]) for name, x in ours[0].items())


@pytest.mark.parametrize(
    "source, target", [(("split", "zero3"), ("fp32", "1d")), (("fp32", "zero1"), ("split", "zero3")),
                    (("split", "1d"), ("split", "stages"))], ids=str,
)  # fmt: skip
def test_checkpoints_hold_the_numbers(source, target, tmp_path):
    storage = open_storage(str(tmp_path))
    directory, stored = saved(configured(*source), storage)
    have = restored(configured(*target), storage, directory)

    def numbers(tensors: dict[str, Tensor], name: str) -> Tensor:
        high, low = tensors[f"model.{name}"], tensors.get(f"low.{name}")
        return high if low is None else join_halves(high.bfloat16(), low.short()).double()

    names = [name.removeprefix("model.") for name in have if name.startswith("model.")]
    assert all(torch.equal(numbers(have, name), numbers(stored, name)) for name in names)
    assert any(name.startswith("low.") for name in have) == (target[0] == "split")


@pytest.mark.parametrize(
    "more, line",
    [
        ({"precision": "fp32"}, "optimizer.masters=split: precision=fp32 has no bf16 weights.*: fp32, precision=bf16"),
        ({"precision": "fp16"}, "precision=fp16 has no bf16 weights"),
        ({"kind": "muon"}, "muon reads whole master copies; nearest legal: fp32, optimizer=adamw"),
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_halves_is_refused(more, line):
    c = configured()
    c.precision, c.optimizer.kind = more.get("precision", c.precision), more.get("kind", c.optimizer.kind)
    with pytest.raises(ConfigError, match=line):
        make_plan(c)
