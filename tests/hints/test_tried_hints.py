"""Every value named as nearest legal is, beside all other keys of the command; and all refusals come at once."""

from __future__ import annotations

import pytest

from platform.api import Config
from platform.api import plan as plan_from_python
from platform.boundary.refusals import NEAREST, ConfigError, find_refused_key
from platform.predict.legal_hints import BESIDE
from tests.fuzz import hints as fuzz
from tests.hints.follow_hints import hints

ONE = "parallel.data=1 tensor=1d"
HEADS = f"{ONE} model.d_model=24 model.d_kv=4 model.heads=8 model.d_ff=72 tensor.axes.t=6"
RAMP = f"{ONE} model.length=64 train.length_ramp=[0:2,10:64]"
EXPERTS = f"{ONE} model.experts=6 model.d_ff=96 parallel.tensor_experts=whole"
CASES = {  # arguments -> for each line that refuses them, its key and hints
    f"{HEADS} model.kv_heads=8": [("model.heads", ["tensor.uneven=true", "tensor.axes.t=4", "tensor.axes.t=8"])],
    HEADS: [("model.heads", ["model.heads=6 or 12", "tensor.uneven=true", "tensor.axes.t=4 or 8"])],
    f"{EXPERTS} model.heads=8 tensor.axes.t=6": [("model.heads", ["tensor.uneven=true"])],
    # model.length=63 or 66 is not: the last length is 64
    f"{RAMP} parallel.context=3": [
        ("model.length", ["parallel.context=2", "parallel.context=4"]),
        ("train.length_ramp", ["[]"]),
    ],
    f"{RAMP} tensor.axes.t=4 tensor=1d_sp pipeline=interleaved pipeline.stages=2 pipeline.chunks=9": [
        ("pipeline.stages", ["pipeline.chunks=3"]),
        ("train.length_ramp", ["0:4", "0:8", "0:16"]),
    ],
    "parallel.bucket_mib=0.01 model.heads=3 model.d_model=96 pipeline=1f1b pipeline.stages=20": [
        ("parallel.bucket_mib", ["1", "auto"]),
        ("pipeline.stages", ["6"]),
        ("model.heads", ["model.heads=2 or 4", "tensor.uneven=true", "tensor.axes.t=1 or 3"]),
    ],
}


@pytest.fixture(scope="module", autouse=True)
def composers():
    with fuzz.opened():
        yield


def typed(arguments):
    return ["+experiment=gpt_quick", *arguments.split()]


@pytest.mark.parametrize("arguments", CASES)
def test_all_refusals_come_at_once_with_hints_that_are_legal(arguments):
    lines = fuzz.refused(typed(arguments))
    assert [find_refused_key(line) for line in lines] == [key for key, _ in CASES[arguments]]
    for line, (_, named) in zip(lines, CASES[arguments], strict=True):
        assert line.partition(NEAREST)[2] in (", ".join(named), ", or ".join(named)), line
        for _, hint in hints(line):
            fuzz.follow(lines, typed(arguments), line, hint)


def test_where_no_hint_is_legal_alone_the_other_keys_are_named():
    [line] = fuzz.refused(typed(f"{RAMP} parallel.context=3 parallel.context_kind=nested"))
    keys = "train.length_ramp, model.length"
    assert line.startswith("parallel.context_heads=0: ")
    assert line.endswith(f"; {BESIDE} {keys}: parallel.context_kind=auto")


def test_axes_of_which_none_helps_alone_are_named_together_as_they_are_typed():
    """That of a product, as in tensor.axes.r x tensor.axes.c=2, nobody can type."""
    line, _ = fuzz.refused(typed(f"{ONE}_sp tensor.axes.t=2 parallel.context=2 model.length=7 eval.every=0"))
    assert line.endswith("parallel.context=1 tensor.axes.t=1"), line


def test_from_python_too():
    config = Config()
    config.model.heads, config.model.d_model, config.train.steps = 5, 32, 0
    with pytest.raises(ConfigError) as refused:
        plan_from_python(config)
    assert [find_refused_key(line) for line in refused.value.violations] == ["train.steps", "model.heads"]
