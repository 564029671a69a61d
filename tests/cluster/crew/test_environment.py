"""The environment of a worker on a GPU, tested without one: set before torch is imported, where the user has none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from platform.cluster.crew.base.job import ALSO, CUDA_ENVIRONMENT, DETERMINISTIC_ENVIRONMENT, Job, assign
from platform.cluster.crew.launchers import ray_session
from platform.config.fields import Config, Train

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"


@pytest.fixture
def place(monkeypatch):
    for name in (*CUDA_ENVIRONMENT, *DETERMINISTIC_ENVIRONMENT, *ALSO.values()):
        monkeypatch.delenv(name, raising=False)

    def made(device="cuda", deterministic=False):
        config = Config(train=Train(deterministic=deterministic))
        job = Job(config, [{"data": 0}], device, Path("runs"))
        return assign(job, 0, local_rank=0, local_world_size=1, group_rank=0)

    return made


def entered(place, **own) -> dict[str, str]:
    """What a new process finds in its environment when it imports torch, if it had `own` there before."""
    code = (
        "import os, sys\n"
        "from platform.cluster.crew.base.job import Assignment\n"
        f"Assignment('', {{}}, 0, 'cuda', '', 1, defaults={place.defaults!r}).enter_environment()\n"
        "assert 'torch' not in sys.modules\n"
        "import json; print(json.dumps(dict(os.environ)))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], env={**os.environ, **own}, check=True, capture_output=True)
    return json.loads(out.stdout)


def test_a_worker_on_a_gpu_has_ours(place):
    assert place().defaults == CUDA_ENVIRONMENT and place("cpu").defaults == {}
    found = entered(place())
    assert CUDA_ENVIRONMENT.items() <= found.items()


def test_a_deterministic_one_has_more_before_cuda_starts(place):
    found = entered(place(deterministic=True))
    assert (CUDA_ENVIRONMENT | DETERMINISTIC_ENVIRONMENT).items() <= found.items()
    assert place("cpu", deterministic=True).defaults == {}
    assert entered(place(deterministic=True), NCCL_ALGO="Ring")["NCCL_ALGO"] == "Ring"


def test_what_the_user_has_set_wins_at_the_driver_and_at_the_worker(place, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    told = place().defaults
    assert told["CUDA_DEVICE_MAX_CONNECTIONS"] == "8" and "PYTORCH_ALLOC_CONF" not in told
    assert told["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:512"
    monkeypatch.undo()
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    found = entered(place(), **own)
    assert own.items() <= found.items() and "PYTORCH_ALLOC_CONF" not in found


def test_the_page_lists_all_of_it():
    rows = dict(re.findall(r"^\| `([A-Z_]+)=(\S+)` \|", PAGE.read_text(), re.MULTILINE))
    assert rows == CUDA_ENVIRONMENT | DETERMINISTIC_ENVIRONMENT


def test_an_embedded_ray_has_no_more_gpus_than_there_are(monkeypatch):
    told = {}
    monkeypatch.setattr(ray_session, "_init", lambda _, **arguments: told.update(arguments))
    monkeypatch.setattr(ray_session, "gpu_count", lambda: 4)
    for size, gpus, expected in ((8, True, 4), (2, True, 2), (8, False, 0)):
        ray_session.Embedded(size, gpus=gpus).close()
        assert told["num_gpus"] == expected and told["num_cpus"] == size
