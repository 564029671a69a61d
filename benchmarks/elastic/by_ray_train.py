"""Ray Train's elastic training, as its guide shows it: DDP, a checkpoint every few steps, ScalingConfig with a range.

python -m benchmarks.elastic.by_ray_train FOLDER     on a node whose RAY_ADDRESS is set
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from benchmarks.elastic.work import SAVED, WORKERS, batches_of, config, model_of, recorder
from benchmarks.peers import environment

LEAST = 2


def on_worker(settings: dict[str, str]) -> None:
    """Run in each process that Ray Train starts, which has formed the gloo group: train for ever."""
    import ray.train
    import torch
    from ray.train import Checkpoint
    from ray.train.torch import prepare_model

    from benchmarks.peers.gpt import adamw

    torch.set_num_threads(1)
    c, context = config(), ray.train.get_context()
    model = prepare_model(model_of(c), move_to_device=False)
    optimizer, step = adamw(model, c), 0
    if newest := ray.train.get_checkpoint():
        with newest.as_directory() as folder:
            state = torch.load(Path(folder, "state"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    world, rank = context.get_world_size(), context.get_world_rank()
    batches, record = batches_of(c, rank), recorder(Path(settings["folder"], "steps"))
    formation = str(os.getpid())
    while True:
        step += 1
        model(*batches(step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        record(step, world, formation)
        if step % SAVED:
            continue
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                           Path(folder, "state"))  # fmt: skip
            ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def main(folder: str) -> None:
    environment.use()
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path[:1] + [str(environment.FOLDER)])}})
    run = RunConfig(
        storage_path=folder,
        name="run",
        failure_config=FailureConfig(max_failures=-1),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )
    scaling = ScalingConfig(num_workers=(LEAST, WORKERS), use_gpu=False, resources_per_worker={"CPU": 1})
    settings = {"folder": folder}
    torch_config = TorchConfig(backend="gloo")
    TorchTrainer(
        on_worker, train_loop_config=settings, torch_config=torch_config, scaling_config=scaling, run_config=run
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
