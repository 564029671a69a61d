"""Passes of chunks that are alike are measured once; that changes no number."""

from dataclasses import replace

import pytest

from platform.plan.step_collectives import resolve_auto_kernels
from platform.predict import footprint
from platform.predict.footprint import chunk_likeness
from platform.predict.make_plan import make_plan
from tests.harness.oracle import MODELS, configure
from tests.harness.planned_memory import predict_training

CASES = {
    "gpt": {"pipeline": "1f1b", "stages": 4, "tensor": "1d", "axes": {"t": 2}, "recompute": "full"},
    "gqa_tied": {"pipeline": "interleaved", "stages": 2, "chunks": 3, "data": 2, "zero": 3, "precision": "bf16"},
    "modern": {"pipeline": "zb_h1", "stages": 4, "data": 2, "zero": 2, "recompute": "selective", "dropout": 0.1},
    "gpt_oss": {"pipeline": "interleaved", "stages": 4, "chunks": 2, "data": 2, "experts_of": 2},
    "t5": {"pipeline": "1f1b", "stages": 4, "data": 2, "zero": 1},
    "original": {"pipeline": "gpipe", "stages": 4, "precision": "bf16"},
}


def configured(name: str):
    return configure(**{**MODELS[name], "layers": 8, "global_batch": 32, **CASES[name]})


@pytest.mark.parametrize("name", CASES)
def test_sharing_measurements_changes_no_number(name, monkeypatch):
    c = configured(name)
    plan = make_plan(c)
    measured = []
    monkeypatch.setattr(
        footprint,
        "measure_passes",
        lambda *a, _real=footprint.measure_passes, **k: measured.append(a) or _real(*a, **k),
    )
    shared, several = predict_training(c, plan), len(measured)
    monkeypatch.setattr(footprint, "chunk_likeness", lambda plan, chunk, buckets: ("alone", chunk.number))
    assert predict_training(c, plan) == shared
    assert several < len(measured) - several or name in ("t5", "original")


def likenesses(plan, stages):
    plans = [resolve_auto_kernels(plan, "cpu", 0.0).stage_part(stage) for stage in stages]
    return [chunk_likeness(part, part.chunks[0], part.buckets) for part in plans]


def test_layers_in_the_middle_are_alike_and_the_ends_are_not():
    first, second, third, last = likenesses(make_plan(configured("gpt")), range(4))
    assert second == third and first != second != last


def test_what_decides_bytes_tells_chunks_apart():
    plan = make_plan(configured("gpt"))
    part = plan.stage_part(1)
    [chunk] = part.chunks
    whole = chunk_likeness(part, chunk, part.buckets)
    (at, *words), *others = chunk.functions
    fewer = dict(list(chunk.operations.items())[:-1])
    wider = [replace(b, elements=b.elements + 1) for b in part.buckets]
    for changed in (replace(chunk, functions=((at, *words, "more"), *others)), replace(chunk, operations=fewer)):
        assert chunk_likeness(part, changed, part.buckets) != whole
    assert chunk_likeness(part, chunk, wider) != whole
    assert chunk_likeness(part, replace(chunk), [replace(b) for b in part.buckets]) == whole
