"""States stored in one form and plan, restored in another: what was stored, rounded once to what is kept here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from platform.boundary.storage import open_storage
from platform.checkpoint.blocks import Block
from platform.checkpoint.catalogue import choose_attempt_directory, commit_checkpoint, load_manifest
from platform.checkpoint.manifest import Meta, Refused
from platform.config.fields import Config
from platform.optimizer.stored_states import decode_blocks, encode_blocks
from tests.harness.commands import QUICK, SMALL, in_this_process, lines
from tests.harness.oracle import configure
from tests.optimizer.test_stored_states import PLANS, WIDE
from tests.train.recovery.test_resume import ranks, whole

PLANS = {"serial": {}, **PLANS, "odd": {"data": 3, "zero": 1, "d_model": 24, "heads": 4}}
FORMS = ("fp32", "bf16", "int8")
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def configured(moments: str, plan: str, **more) -> Config:
    c = configure(**{**WIDE, "layers": 2, "global_batch": 6, "microbatch": 1, **more, **PLANS[plan]})
    c.optimizer.moments = moments
    return c


def doubles(state) -> list[Block]:
    """Copies of a rank's blocks, which fp64 holds exactly."""
    return [Block(name, box, tensor.to(torch.float64, copy=True)) for name, box, tensor in state.live_blocks()]


def saved(c: Config, storage) -> tuple[str, dict[str, Tensor]]:
    """The checkpoint after a step, and its whole tensors."""
    directory, reports, shapes = choose_attempt_directory(storage, 1), [], {}

    def work(state, part, trainer):
        trainer.step(1)
        part.after.append(doubles(state))
        part.values = state.read_values()
        state.checkpoint_image.fill_parts(state.live_blocks())
        reports.append(state.checkpoint_image.write_file(storage, directory))
        shapes.update({h.name: h.shape for h in state.held})

    parts = ranks(c, work)
    commit_checkpoint(storage, directory, shapes, reports, Meta(1, 6, c.seed, "", {}, "", {}, parts[0].values))
    return directory, whole([part.after[0] for part in parts], shapes)


def restored(c: Config, storage, directory: str) -> dict[str, Tensor]:
    """Whole tensors of a state restored from a checkpoint, from which it can go on."""
    shapes = {}

    def work(state, part, trainer):
        state.restore_checkpoint(storage, directory, load_manifest(storage, directory))
        part.after.append(doubles(state))
        shapes.update({h.name: h.shape for h in state.held})
        part.numbers.append((trainer.step(2).loss, 0.0))

    return whole([part.after[0] for part in ranks(c, work)], shapes)


def wide(tensors: dict[str, Tensor], moment: str, name: str) -> Tensor:
    """The numbers, flat, that a stored moment stands for."""
    flat, scales = tensors[f"{moment}.{name}"].view(-1), tensors.get(f"{moment}_scale.{name}")
    if scales is None:
        return flat
    return decode_blocks(flat.to(torch.uint8), scales.view(-1).float(), SIGNED[moment], torch.float64)


def rounded(x: Tensor, form: str, moment: str, coded: bool) -> Tensor:
    """Numbers as they are when they have been kept in a form."""
    if form == "int8" and coded:
        return decode_blocks(*encode_blocks(x, SIGNED[moment]), SIGNED[moment], torch.float64)
    return x.bfloat16().double() if form == "bf16" else x


@pytest.mark.parametrize(
    "source, target",
    [
        (("fp32", "zero3"), ("int8", "1d")), (("int8", "zero2"), ("fp32", "zero3")),
        (("int8", "1d"), ("bf16", "serial")), (("bf16", "stages"), ("int8", "zero1")),
        (("int8", "zero1"), ("int8", "zero3")), (("bf16", "1d"), ("fp32", "zero1")),
        (("fp32", "serial"), ("bf16", "zero2")),
    ],
    ids=str,
)  # fmt: skip
def test_any_form_becomes_any_other_under_any_plan(source, target, tmp_path):
    storage = open_storage(str(tmp_path))
    directory, stored = saved(configured(*source), storage)
    have = restored(configured(*target), storage, directory)
    names = [name.removeprefix("model.") for name in have if name.startswith("model.")]
    coded = 0
    for name in names:
        assert torch.equal(have[f"model.{name}"], stored[f"model.{name}"])
        for moment in SIGNED:
            was, has = (wide(tensors, moment, name) for tensors in (stored, have))
            is_coded = f"{moment}_scale.{name}" in have
            exact = target[0] == source[0]
            assert torch.equal(has, was if exact else rounded(was, target[0], moment, is_coded)), (moment, name)
            coded += is_coded
    assert (coded > 0) == (target[0] == "int8")


def test_shards_that_cut_blocks_read_what_has_scales(tmp_path):
    """Only what keeps moments in 8 bits needs whole blocks: others read them cut anywhere."""
    storage = open_storage(str(tmp_path))
    shape = {"d_model": 24, "heads": 4, "d_kv": 16, "d_ff": 512}
    directory, stored = saved(configured("int8", "serial", **shape), storage)
    have = restored(configured("fp32", "odd", d_kv=16), storage, directory)
    moments = [name for name in have if name.startswith("exp_avg") and f"{name.partition('.')[0]}_scale" in stored]
    for name in (n.removeprefix("model.") for n in have if n.startswith("model.")):
        for moment in SIGNED:
            assert torch.equal(have[f"{moment}.{name}"].view(-1), wide(stored, moment, name)), (moment, name)
    assert not moments and any("_scale." in name for name in stored)


def test_codes_without_their_scales_are_refused(tmp_path):
    storage = open_storage(str(tmp_path))
    directory, _ = saved(configured("int8", "serial"), storage)
    manifest = load_manifest(storage, directory)
    lost = next(name for name in manifest.tensors if name.startswith("exp_avg_scale."))
    del manifest.tensors[lost]
    for form in FORMS:

        def work(state, part, trainer):
            with pytest.raises(Refused, match=f"has no {lost}"):
                state.restore_checkpoint(storage, directory, manifest)

        ranks(configured(form, "serial"), work)


def test_a_run_says_that_it_converts(tmp_path):
    run = [QUICK, *SMALL, "cluster=inline", "tensor=serial", "parallel.data=1", "data=synthetic", "eval.every=0"]
    first = [*run, "run.dir=run", "train.steps=4", "train.stop_at=2"]
    done = in_this_process(*first, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = in_this_process(*first[:-1], "optimizer.moments=int8", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed  optimizer.moments: fp32 there, int8 here" in done.stdout
    elsewhere = [*run, "run.dir=other", "train.steps=4", "checkpoint.resume=run/checkpoints", "optimizer.masters=split"]
    done = in_this_process(*elsewhere, "precision=bf16", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed  optimizer.moments: int8 there, fp32 here" in done.stdout
    assert "changed  optimizer.masters: fp32 there, split here" in done.stdout


@pytest.mark.full
def test_a_run_goes_on_in_8_bits_and_back_and_says_so(tmp_path):
    run = [QUICK, *SMALL, "cluster=inline", "tensor=serial", "parallel.data=1", "data=synthetic", "eval.every=0"]
    for step, (precision, before) in enumerate([("bf16", ""), ("fp8", "bf16"), ("bf16", "fp8")], 1):
        done = in_this_process(
            *run, "run.dir=run", "train.steps=6", f"train.stop_at={2 * step}", f"precision={precision}", cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not before or f"changed  precision: {before} there, {precision} here" in done.stdout, done.stdout
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl") if "loss" in row][-1] == 6
