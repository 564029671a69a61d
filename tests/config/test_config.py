"""What makes a run this run."""

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.config.identity import run_identity
from platform.launch import compose_config
from tests.harness.commands import QUICK


def test_plain_data_and_back():
    config = compose_config([QUICK, "tensor=3d", "branch=dsp", "branch.axes.g=2"])
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_dict({"train": {"steps": 3}}).train.steps == 3
    with pytest.raises(ConfigError, match="train.stepz=3: unknown key; nearest legal: train.steps"):
        Config.from_dict({"train": {"stepz": 3}})
    with pytest.raises(ConfigError, match="train.steps"):
        Config.from_dict({"train": {"steps": True}})


def test_identity():
    identity = run_identity(compose_config([QUICK]))
    same = [
        "tensor=3d",
        "parallel.data=1",
        "cluster=processes",
        "train.steps=7",
        "train.microbatch=2",
        "precision=fp64",
    ]
    assert run_identity(compose_config([QUICK, *same, "data.cache=x", "eval.every=1"])) == identity
    for other in ("seed=1", "model.dropout=0.1", "optimizer.lr=1", "train.global_batch=8", "data=synthetic"):
        assert run_identity(compose_config([QUICK, other])) != identity, other
