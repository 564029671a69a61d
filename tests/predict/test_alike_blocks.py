"""Work of alike blocks is noted once: a step has the work of blocks that are noted one by one, whatever they are."""

from dataclasses import replace

import pytest

from platform.launch import compose_config
from platform.predict import work
from platform.predict.make_plan import plan_quickly
from platform.predict.step_price import build_step_work

FEW = "model.vocab=3072 precision=bf16 parallel.data=2 train.global_batch=8 train.microbatch=2"
PLANS = {
    "alike": "model=llama_8b model.layers=6 tensor=1d_sp tensor.axes.t=2 recompute=full recompute_every=4",
    "windows between": "+experiment=gpt_oss_20b model.layers=6 model.window_layers=[0,2,3] parallel.experts=2",
    "dense before experts": "+experiment=deepseek_v3 model.layers=5 parallel.experts=2 tensor=serial pipeline=none",
    "encoder and decoder": "model=t5_large_mod model.layers=3 branch=none recompute=selective",
    "stages": "model=gpt3_13b model.layers=7 pipeline=interleaved pipeline.stages=2 pipeline.chunks=2",
    "weights apart": "model=gpt3_13b model.layers=5 pipeline=zb_h1 pipeline.stages=2 model.dropout=0.1",
    "layers frozen": "model=llama_8b model.layers=5 train.freeze=[layers.1.*,layers.3.mlp.*]",
    "adapters": "model=llama_8b model.layers=4 tune=qlora",
    "contexts": "model=llama_8b model.layers=4 parallel.context=2 parallel.zero=3",
    "in fp8": "+experiment=llama_8b_fp8 model.layers=6 cluster.gpu=H100-80GB",
}


def note_work(typed: str) -> work.StepWork:
    config = compose_config([*typed.split(), *FEW.split()])
    if config.pipeline.stages == 1:
        config = replace(config, pipeline=replace(config.pipeline, kind="none"))
    plan = plan_quickly(config)
    assert plan, typed
    return build_step_work(config, plan)


def note_one_by_one(typed: str, monkeypatch: pytest.MonkeyPatch) -> work.StepWork:
    with monkeypatch.context() as patched:
        patched.setattr(work, "_key_blocks", lambda *_: {})
        return note_work(typed)


def passes(noted: work.StepWork) -> tuple:
    return noted.forward, noted.backward, noted.once


@pytest.mark.parametrize("name", PLANS)
def test_a_step_has_the_work_of_blocks_noted_one_by_one(name, monkeypatch):
    assert passes(note_work(PLANS[name])) == passes(note_one_by_one(PLANS[name], monkeypatch))


@pytest.mark.parametrize("name", ["windows between", "dense before experts", "layers frozen"])
def test_negative_control_all_blocks_are_taken_for_alike(name, monkeypatch):
    one_by_one = note_one_by_one(PLANS[name], monkeypatch)

    def alike(plan, chunk):
        return dict.fromkeys((block for block, _ in chunk.blocks), ("alike",))

    monkeypatch.setattr(work, "_key_blocks", alike)
    assert passes(note_work(PLANS[name])) != passes(one_by_one)
