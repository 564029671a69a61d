"""From pipeline.* to the table of a run; what cannot be is refused with the nearest that can."""

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config, Pipeline, Train
from platform.launch import compose_config
from platform.plan.generators import SCHEDULES, generate
from platform.plan.schedule import ScheduleError, table
from platform.predict.choose_schedule import build_schedule, register_pipeline
from platform.predict.make_plan import make_plan
from tests.harness.schedule_files import to_csv


def config(batch: int = 16, microbatch: int = 2, **pipeline) -> Config:
    return Config(train=Train(global_batch=batch, microbatch=microbatch), pipeline=Pipeline(**pipeline))


def refused(*args, data: int = 1, **kwargs) -> list[str]:
    with pytest.raises(ConfigError) as error:
        build_schedule(config(*args, **kwargs), data)
    return error.value.violations


def test_microbatches_are_what_one_replica_does_in_a_step():
    assert build_schedule(config(kind="interleaved", stages=2, chunks=2), data=2) == generate("interleaved", 2, 2, 4)


def test_without_a_pipeline_each_backward_pass_follows_its_forward_pass():
    assert table(build_schedule(config(batch=4), 1).rows) == "stage 0 | 0F0 0B0 0F1 0B1"


def test_too_few_microbatches_are_filled_up():
    assert build_schedule(config(batch=12, kind="zb_h1", stages=4, chunks=2), data=2) == generate("zb_h1", 4, 2, 4)


def test_a_schedule_that_is_too_long_is_refused_before_it_is_made():
    """Stages ask for microbatches of their own: 501 of them, with two chunks each, for 501, whatever the batch."""
    [line] = refused(kind="interleaved", stages=501, chunks=2)
    assert line.startswith("pipeline.stages=501: with pipeline.chunks=2, 502002 passes at least, of which")
    assert line.endswith("; nearest legal: 316")


def test_several_chunks_where_there_is_one():
    [line] = refused(kind="gpipe", stages=2, chunks=3)
    assert line.startswith("pipeline=gpipe: gpipe has one chunk per stage, not 3")


def test_a_schedule_in_a_file(tmp_path):
    path = str(tmp_path / "mine.csv")
    to_csv(generate("zb_h1", 2, 2, 4), path)
    mine = config(batch=8, kind="file", file=path, stages=2, chunks=2)
    assert build_schedule(mine, 1).rows == generate("zb_h1", 2, 2, 4).rows
    assert refused(batch=12, kind="file", file=path, stages=4) == [
        "pipeline.stages=4: the table in pipeline.file has 2; nearest legal: 2",
        "pipeline.chunks=1: the table in pipeline.file has 2; nearest legal: 2",
        "train.global_batch=12: is 6 microbatches; the table in pipeline.file has 4; nearest legal: 8",
    ]
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1B0,1F0\n")
    assert refused(kind="file", file=path, stages=2) == [
        f"pipeline.file={path}: 1B0 stands before 1F0",
        "stage 0 | 0F0 0B0",
        "stage 1 | 1B0 1F0",
    ]
    [line] = refused(kind="file", file=path + "x")
    assert line.startswith(f"pipeline.file={path}x: cannot be read")


def test_a_registered_schedule(monkeypatch):
    monkeypatch.setattr("platform.predict.choose_schedule.SCHEDULES", SCHEDULES)
    monkeypatch.setattr("platform.predict.choose_schedule.register_own_function", lambda *_: None)

    def pairs(stages, chunks, microbatches):
        if microbatches % 2:
            raise ScheduleError("needs pairs")
        return SCHEDULES["gpipe"](stages, chunks, microbatches)

    register_pipeline("pairs", pairs)
    try:
        assert build_schedule(config(kind="pairs", stages=2), 1).name == "pairs"
        assert build_schedule(config(batch=6, kind="pairs", stages=2), 1).microbatches == 4  # filled up
    finally:
        del SCHEDULES["pairs"]


SELECTIVE = ["+experiment=one_gpu", "recompute=selective", "model.layers=2"]
ON_GPUS = [*SELECTIVE, "cluster.device=cuda"]


@pytest.mark.parametrize("more", [[], ["tensor=1d_sp", "tensor.axes.t=2"], ["model.attention_sinks=true"]])
def test_what_selective_recomputation_does_not_save_is_refused(more):
    """One kernel keeps queries, keys and values alone, which recomputation keeps too."""
    with pytest.raises(ConfigError, match=r"recompute=selective: saves nothing where .*; nearest legal: none, full$"):
        make_plan(compose_config([*ON_GPUS, *more]))


@pytest.mark.parametrize(
    "arguments",
    [
        [*SELECTIVE, "cluster.device=cpu"],
        [*ON_GPUS, "train.attention_kernel=math"],
        [*ON_GPUS, "model.dropout=0.1"],
        [*ON_GPUS, "model.kv_heads=2", "model.window=8"],  # keys of every head, made inside
    ],
    ids=" ".join,
)
def test_what_it_saves_is_not(arguments):
    assert make_plan(compose_config(arguments)).recompute.kind == "selective"
