"""The environment of a worker on a GPU, tested without one: set before torch is imported, where the user has none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from platform.cluster.crew import ray_session
from platform.cluster.crew.job import (
    ALSO,
    CUDA_ENVIRONMENT,
    DETERMINISTIC_ENVIRONMENT,
    GLOO_ENVIRONMENT,
    TENSOR_ENVIRONMENT,
    THREAD_ENVIRONMENT,
    Job,
    assign_worker,
)
from platform.config.fields import Config, Parallel, Tensor, Train

EVERYWHERE = GLOO_ENVIRONMENT | THREAD_ENVIRONMENT
PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"


@pytest.fixture
def place(monkeypatch):
    for name in (*CUDA_ENVIRONMENT, *TENSOR_ENVIRONMENT, *DETERMINISTIC_ENVIRONMENT, *EVERYWHERE, *ALSO.values()):
        monkeypatch.delenv(name, raising=False)

    def assign_seat(device="cuda", deterministic=False, t=2, zero=0):
        tensor = Tensor(scheme="1d", axes={"t": t})
        config = Config(train=Train(deterministic=deterministic), tensor=tensor, parallel=Parallel(zero=zero))
        job = Job(config, [{"data": 0}], device, Path("runs"))
        return assign_worker(job, 0, local_rank=0, local_world_size=1, group_rank=0)

    return assign_seat


def entered(place, **own) -> dict[str, str]:
    """What a new process finds in its environment when it imports torch, if it had `own` there before."""
    code = (
        "import os, sys\n"
        "from platform.cluster.crew.job import Assignment\n"
        f"Assignment('', {{}}, 0, 'cuda', '', 1, defaults={place.defaults!r}).enter_environment()\n"
        "assert 'torch' not in sys.modules\n"
        "import json; print(json.dumps(dict(os.environ)))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], env={**os.environ, **own}, check=True, capture_output=True)
    return json.loads(out.stdout)


def test_a_worker_on_a_gpu_has_ours(place):
    ours = EVERYWHERE | CUDA_ENVIRONMENT | TENSOR_ENVIRONMENT
    assert place().defaults == ours and place("cpu").defaults == EVERYWHERE
    assert ours.items() <= entered(place()).items()


def test_one_hardware_queue_is_for_tensor_parallelism_alone(place):
    """In one queue, whatever waits for an event holds up all that is launched after it: a send that is not received
    yet, a gather of ZeRO-3 for the next span."""
    for few in ({"t": 1}, {"t": 1, "zero": 3}, {"zero": 3}):
        assert not TENSOR_ENVIRONMENT.keys() & place(**few).defaults.keys()


def test_a_deterministic_one_has_more_before_cuda_starts(place):
    environment = entered(place(deterministic=True))
    assert (CUDA_ENVIRONMENT | DETERMINISTIC_ENVIRONMENT).items() <= environment.items()
    assert place("cpu", deterministic=True).defaults == EVERYWHERE
    assert entered(place(deterministic=True), NCCL_ALGO="Ring")["NCCL_ALGO"] == "Ring"


def test_what_the_user_has_set_wins_at_the_driver_and_at_the_worker(place, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    told = place().defaults
    assert told["CUDA_DEVICE_MAX_CONNECTIONS"] == "8" and "PYTORCH_ALLOC_CONF" not in told
    assert told["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:512"
    monkeypatch.undo()
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    environment = entered(place(), **own)
    assert own.items() <= environment.items() and "PYTORCH_ALLOC_CONF" not in environment


def test_a_policy_of_waiting_of_the_users_own_stays(place, monkeypatch):
    """OMP_WAIT_POLICY is another name for what GOMP_SPINCOUNT says, and that would win against it."""
    assert entered(place("cpu"), OMP_WAIT_POLICY="active").keys() & {"GOMP_SPINCOUNT"} == set()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert place("cpu").defaults == GLOO_ENVIRONMENT | {"OMP_WAIT_POLICY": "active"}


def test_the_page_lists_all_of_it():
    rows = dict(re.findall(r"^\| `([A-Z_0-9]+)=(\S+)` \|", PAGE.read_text(), re.MULTILINE))
    assert rows == CUDA_ENVIRONMENT | TENSOR_ENVIRONMENT | DETERMINISTIC_ENVIRONMENT | EVERYWHERE


def test_an_embedded_ray_has_no_more_gpus_than_there_are(monkeypatch):
    told = {}
    monkeypatch.setattr(ray_session, "_init_ray", lambda _, **arguments: told.update(arguments))
    monkeypatch.setattr(ray_session, "gpu_count", lambda: 4)
    for size, gpus, expected in ((8, True, 4), (2, True, 2), (8, False, 0)):
        ray_session.EmbeddedRay(size, gpus=gpus).close()
        assert told["num_gpus"] == expected and told["num_cpus"] == size
