"""When a run has to end by itself."""

import threading

import pytest

from platform.cluster.callbacks import seconds_left
from platform.config.groups import Run
from platform.config.key import SECONDS

SLURM = {"SLURM_JOB_END_TIME": "5000"}


@pytest.mark.parametrize(
    ("limit", "environment", "expected"),
    [
        ("", {}, None),
        ("0", SLURM, None),  # typed: no limit
        ("3600", SLURM, 3480.0),
        ("1:00:00", {}, 3480.0),
        ("1:30", {}, 45.0),  # of a short one half is left to run
        ("", SLURM, 3880.0),
        ("", {"SLURM_JOB_END_TIME": "100"}, 0.0),
        ("", {"SLURM_JOB_END_TIME": "unlimited"}, None),
        ("", {"SLURM_JOB_END_TIME": "999999999999"}, SECONDS),
        ("", {"SLURM_JOB_END_TIME": "9999999999999"}, None),
    ],
)
def test_seconds(limit, environment, expected):
    assert seconds_left(Run(time_limit=limit), environment, now=1000.0) == expected
    assert expected is None or expected <= threading.TIMEOUT_MAX
