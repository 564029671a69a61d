"""Ray Train: its DDP in the processes that it starts, and ours in turn with it in the same ones."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.peers import environment
from benchmarks.peers.gpt import adamw
from benchmarks.peers.replicated import Step, clipped, loop, replica
from platform.config.fields import Config
from platform.plan.plan import Plan
from platform.runtime.communicator import Communicator

ROOT = Path(__file__).resolve().parents[2]


def prepared(c: Config, weights: Mapping[str, Tensor], communicator: Communicator, compiled: bool) -> Step:
    """Train what `ray.train.torch.prepare_model` makes of the model: torch's DDP."""
    from ray.train.torch import prepare_model

    model = prepare_model(replica(c, weights, compiled), move_to_device=False)
    return loop(c, communicator, model, adamw(model, c), clipped(model))


def on_worker(settings: dict[str, Any]) -> None:
    """Run in a process of Ray Train's, which has formed the gloo group: do the work, and write what it returns."""
    import torch.distributed as dist

    from platform.plan.step_collectives import process_groups
    from platform.runtime.process_groups import ProcessGroups

    work, job, plan = pickle.loads(settings["pickled"])
    communicator = ProcessGroups(plan.mesh, dist.get_rank(), process_groups(plan))
    outcome = work(job, plan, communicator)
    Path(settings["folder"], str(communicator.rank)).write_bytes(pickle.dumps(outcome))


def launch(work: Callable[..., Any], job: Any, plan: Plan) -> list[Any]:
    """Run work(job, plan, communicator) on the processes of a Ray Train run, under a Ray of its own; return what it
    returned on every rank."""
    environment.use()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(environment.FOLDER)])
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from platform.cluster.crew.ray_session import EmbeddedRay

    size = plan.mesh.world_size
    session = EmbeddedRay(size + 1, gpus=False)  # one more for the trainer's own actor
    try:
        with tempfile.TemporaryDirectory() as folder:
            TorchTrainer(
                on_worker,
                train_loop_config={"pickled": pickle.dumps((work, job, plan)), "folder": folder},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=size, use_gpu=False),
                run_config=RunConfig(storage_path=folder, name="peers"),
            ).fit()
            return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]
    finally:
        session.close()
