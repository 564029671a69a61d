"""Session with the workers of a trained model: a crew that has formed and has its weights, for as long as it is asked.
`TrainedModel` is the model that a command names: its weights, configuration and tokenizer."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from platform.boundary.redaction import known_secrets, strip_url_secrets
from platform.boundary.refusals import ConfigError, format_violation, refuse_all, refuse_failures, rephrase_refusals
from platform.boundary.schema import Malformed
from platform.boundary.storage import open_storage
from platform.boundary.terminal import Say
from platform.checkpoint import catalogue
from platform.checkpoint.catalogue import read_carried_files
from platform.checkpoint.manifest import Refused
from platform.cluster import resources, run_directory
from platform.cluster.crew.crew import ByRank, Crew, Worker
from platform.cluster.crew.job import Job
from platform.cluster.crew.launchers import open_crew
from platform.config.fields import Config, Model
from platform.config.groups import Data
from platform.config.identity import find_checkpoint_url
from platform.plan.plan import Plan
from platform.plan.plan_data import plan_digest
from platform.plan.simulate import stage_rows
from platform.predict.choose_schedule import build_generation_model, build_schedule, violations_of_kernel
from platform.weights.importing import keys_of_saved_model, open_initial_weights
from platform.weights.model_folder import CONFIG, GENERATION, SavedModel, read_companions_and_tokenizer_lack
from platform.weights.tensor_names import parse_stored_model


@contextmanager
def open_session(
    config: Config, plan: Plan, say: Say, *, corpus: str = "", generates_texts: bool = True
) -> Iterator[Crew]:
    """Open a crew of workers under `plan` that hold the trained weights of train.init, to be asked, and close it after
    the block. `corpus`: the folder of the tokens that they evaluate on; `generates_texts`: they are asked to continue
    or score texts. Raises ConfigError, before any process starts unless only workers can see it; WorkerFailed if one
    fails."""
    if generates_texts:
        config = replace(config, monitor=replace(config.monitor, sample=1))  # as a run that asks its model
        build_generation_model(config)
    open_initial_weights(config)
    places = resources.await_worker_places(config.cluster, plan.mesh.world_size, say)
    placed_config = replace(config, cluster=replace(config.cluster, device=places.device))
    refuse_all(violations_of_kernel(placed_config, plan))
    size, schedule = plan.mesh.world_size, build_schedule(config, plan.num_replicas)
    coordinates = [plan.mesh.rank_coordinates(rank) for rank in range(size)]
    with tempfile.TemporaryDirectory(prefix="answers-") as logs:
        job = Job(config=config, coordinates=coordinates, device=places.device, run_dir=Path(logs),
                  secrets=known_secrets())  # fmt: skip
        with open_crew(resources.launcher_kind(config.cluster), job) as crew:
            crew.assign_ranks(job, list(range(size)))
            stage_of = list(schedule.placement)
            seating = size, config, crew.store, 1, stage_of, plan_digest(plan)
            crew.call_ranks(Worker.join_mesh, ByRank(range(size)), *seating)
            rows = [stage.encode_rows() for stage in stage_rows([schedule])]
            ranks_rows = ByRank(rows[c["stage"]] for c in coordinates)
            crew.call_ranks(Worker.build_trainer, ranks_rows, None, corpus, None, False)
            if failure := crew.call_ranks(Worker.load_initial_weights)[0]:
                raise ConfigError("CHECKPOINT", config.train.init, failure.reason)
            yield crew


NAME = "CHECKPOINT"


@dataclass(frozen=True)
class TrainedModel:
    """Model whose weights are at `url` (for train.init). `data`: its training data, None if unknown; `files`: contents
    of its tokenizer's files and others beside its weights, by name, {} if it has none."""

    url: str
    model: Model
    data: Data | None = None
    seed: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def generation_config(self) -> bytes:
        """Return the contents of generation_config.json beside the model's weights, b"" if there is none."""
        return self.files.get(GENERATION, b"")


def find_trained_model(location: str) -> TrainedModel:
    """Find the trained model that `location` names: the directory of a run, a storage of checkpoints, which stands for
    its newest, one checkpoint, or a folder that transformers saved; paths or URLs. Only documents are read. Raises
    ConfigError."""
    url = location if "://" in location else os.path.abspath(os.path.expanduser(location))
    local = Path(url)
    if url.endswith(".safetensors"):
        return _read_saved_model(url)
    if "://" not in url and (local / run_directory.CONFIG).is_file():
        return _read_checkpoint_model(_find_checkpoint_storage(local))
    with refuse_failures(NAME, strip_url_secrets(location), OSError, why="cannot be read: {}"):
        entries = open_storage(url, NAME).list_sizes("")
    if not entries:
        legal = ["a run directory", "a checkpoint's URL", "a folder that transformers saved"]
        raise ConfigError(NAME, strip_url_secrets(location), "there is nothing", legal)
    return _read_saved_model(url) if CONFIG in entries else _read_checkpoint_model(url)


def _find_checkpoint_storage(directory: Path) -> str:
    """Return the storage in which the run in a directory has its trained model's checkpoints. Raises ConfigError."""
    with refuse_failures(NAME, directory, OSError, Malformed, why="its config.yaml cannot be read ({})"):
        config = run_directory.read_configuration(directory)
        assert config
    config.run.dir = str(directory)
    return find_checkpoint_url(config)


def _read_saved_model(url: str) -> TrainedModel:
    """Return the model to open a session with that transformers saved in the folder at `url`."""
    saved = SavedModel(url, NAME)
    files, _ = read_companions_and_tokenizer_lack(saved, NAME)
    ends = saved.config.get("eos_token_id")
    if GENERATION not in files and isinstance(ends, list):  # as older models say it
        files[GENERATION] = json.dumps({"eos_token_id": ends}).encode()
    return TrainedModel(url, Model(**keys_of_saved_model(saved)), files=files)


def _read_checkpoint_model(url: str) -> TrainedModel:
    """Return the model to open a session with that a checkpoint holds, or a storage's newest good one."""
    with refuse_failures(NAME, strip_url_secrets(url), Refused, OSError):
        storage, name, manifest = catalogue.select_checkpoint(url, NAME, none_reason="holds no checkpoint")
        identity = manifest.meta.identity
        files = read_carried_files(storage, name, manifest)
    with rephrase_refusals(lambda line: format_violation(NAME, strip_url_secrets(url), line)):
        model = parse_stored_model(identity)
    data_keys = identity.get("data")
    data = Config.from_dict({"data": data_keys}).data if isinstance(data_keys, dict) else None
    url = url if url.rstrip("/").endswith(name) else f"{url.rstrip('/')}/{name}"
    return TrainedModel(url, model, data, manifest.meta.seed, files)
