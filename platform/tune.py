"""Command line that tunes a model on your own data: `python -m platform.tune MODEL DATA [KEY=VALUE ...]`.

MODEL is a folder that transformers saved, the name of one in Hugging Face's cache, the directory of a run, or a
checkpoint. DATA is a file or a folder: conversations, prompts with answers, pairs of a chosen and a rejected answer, or
texts. All weights are trained if they fit the devices that are there, or that --workers and --hardware name, beside
GPUs with optimizer states in host memory if need be, else adapters, of a model in 4 bits if need be. The choice is a
command of platform.launch, which is printed and run; KEY=VALUE are as for it.
Exit status: as platform.launch has it.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from platform import launch
from platform.boundary.interrupts import keep_handlers
from platform.boundary.refusals import (
    ConfigError,
    build_command_line,
    format_violation,
    refuse_all,
    rephrase_refusals,
    run_command,
)
from platform.boundary.schema import Malformed
from platform.boundary.terminal import QuickExit, print_line, show_phase
from platform.cluster.crew.failures import NoPlaces
from platform.cluster.resources import count_available_workers, find_device_kind, find_worker_device
from platform.cluster.run_directory import read_configuration
from platform.cluster.shown_commands import Command
from platform.config.arguments import format_hydra_error, parse_typed_values, quote_value
from platform.config.composition import open_composer
from platform.config.fields import Config, list_value_violations
from platform.config.key import WORKERS
from platform.data.conversations import recognise_kind
from platform.data.data_checks import violations_of_sources
from platform.launch import compose_config
from platform.plan.layout import format_count
from platform.plan.plan_summary import format_number
from platform.predict.hardware import Hardware
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_peak_bytes
from platform.predict.search import choose_plan
from platform.predict.step_price import choose_pricing_hardware, memory_of_worker, read_hardware
from platform.weights import FROM_HF

RECIPES = {  # kind of data -> experiment -> tune; the first that fits is taken
    "preferences": {
        "preferences": "none", "preferences_offload": "none", "preferences_lora": "lora", "preferences_qlora": "qlora",
    },
    "": {"fine_tune": "none", "fine_tune_offload": "none", "lora": "lora", "qlora": "qlora"},  # of any other kind
}  # fmt: skip
OFFLOAD = "_offload"  # end of the names of experiments that need memory beside a GPU's
TRAINED = {"none": "all weights", "lora": "adapters", "qlora": "adapters of a model in 4 bits"}
LENGTH = 4096  # tokens of a sequence, where a model reads more and model.length does not say
PLAIN = re.compile(r"[\w./:@+-]+")  # values that need no quotes in Hydra's grammar
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.tune`; return its exit status."""
    parser = build_command_line("tune", __doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for platform.launch")
    parser.add_argument("--plan", action="store_true", help="print the choice and its command, and run nothing")
    parser.add_argument("--workers", type=int, help="how many there are to be (default: a worker per GPU, or core)")
    parser.add_argument("--hardware", help="which are to be fitted: a name in conf/hardware/ (default: what is seen)")
    parser.add_argument("--config-dir", metavar="FOLDER", help="your own configuration files, as for platform.launch")
    launched: list[str] = []

    def choose_command(parsed: Namespace) -> int:
        """Print the choice of a command line of `platform.tune`, and note the words that it launches."""
        launched.extend(_compose_command(parsed))
        return launch.DONE

    with keep_handlers():  # of signals, which a run handles itself
        status = run_command(parser, choose_command, arguments, failures=(NoPlaces, OSError))
    if not launched:
        return status
    if arguments is None:
        sys.argv[1:] = launched
    return launch.main(launched if arguments is not None else None)


def _compose_command(arguments: Namespace) -> list[str]:
    """Print what a command line of `platform.tune` chooses, why, and the command of platform.launch for it; return its
    words, none with --plan. Raises ConfigError with all mistakes."""
    typed, lines = parse_typed_values(arguments.overrides), [*_violations_of_options(arguments)]
    kind = str(typed.get("data") or typed.get("data.kind") or "")
    keys: dict[str, Any] = {}
    for read_keys in (partial(_read_model, arguments.model), partial(_read_data, arguments.data, kind)):
        with _collect_violations(lines):
            keys |= read_keys()
    if lines:  # else a composed run shows more of them
        with _collect_violations(lines):
            _check_overrides(arguments)
    refuse_all(lines)
    choice, words = _choose_recipe(_list_experiments(keys["data"], typed), keys, typed, arguments)
    print_line(f"recipe: {choice}")
    print_line(Command(words, arguments.config_dir).resume_line())
    own_files = ["--config-dir", arguments.config_dir] if arguments.config_dir else []
    return [] if arguments.plan else [*own_files, *words]


@contextmanager
def _collect_violations(lines: list[str]) -> Iterator[None]:
    """Add the mistakes of a command line of `platform.tune` that the block raises as a ConfigError to `lines`."""
    try:
        yield
    except ConfigError as error:
        lines += error.violations


def _violations_of_options(arguments: Namespace) -> Iterator[str]:
    """Yield a refusal line per mistake in the options of a command line of `platform.tune`."""
    if arguments.workers is not None and not 1 <= arguments.workers <= WORKERS:
        legal = [max(1, min(arguments.workers, WORKERS))]
        yield format_violation("--workers", arguments.workers, f"must be >= 1 and <= {WORKERS:,}", legal)
    lines: list[str] = []
    with _collect_violations(lines):
        read_hardware(arguments.hardware or "cpu")
    yield from (f"--hardware: {line}" for line in lines)


def _check_overrides(arguments: Namespace) -> None:
    """Raise ConfigError for each KEY=VALUE of the command line that is wrong with any model and data."""
    with open_composer(arguments.config_dir) as composer:
        config, _, refused = composer.compose_arguments(arguments.overrides)
    refuse_all([*(format_hydra_error(argument, error) for argument, error in refused), *list_value_violations(config)])


def _read_model(location: str) -> dict[str, Any]:
    """Return the keys by which a run is tuned from the model at `location`, of which documents alone are read. Raises
    ConfigError."""
    if "://" not in location and not os.path.exists(os.path.expanduser(location)) and HUB_NAME.fullmatch(location):
        from huggingface_hub import snapshot_download

        try:
            location = snapshot_download(location, local_files_only=True)
        except (OSError, ValueError):  # it is not there, or no model can have this name
            reason = "neither a file or folder, nor a model in Hugging Face's cache"
            raise ConfigError("MODEL", location, reason, [f"hf download {location}"]) from None
    with show_phase("importing torch"):
        from platform.cluster.session import NAME, find_trained_model
        from platform.weights.model_folder import is_saved_model
    with rephrase_refusals(lambda line: f"MODEL{line.removeprefix(NAME)}"):
        trained = find_trained_model(location)
    is_saved, reads_more = is_saved_model(trained.url), trained.model.length > LENGTH
    source = {"model": FROM_HF, "model.source": location} if is_saved else {"model.source": trained.url}
    return source | ({"model.length": LENGTH} if reads_more and trained.model.positions != "learned" else {})


def _read_data(location: str, kind: str) -> dict[str, Any]:
    """Return the keys that read the data at `location`, of a typed `kind` or of what its first records show."""
    return {"data": kind or recognise_kind(location, "DATA"), "data.path": location}


def _list_experiments(kind: str, typed: Mapping[str, Any]) -> list[str]:
    """Return the experiments of which the first that fits is taken, for a `kind` of data: the typed one, or all that
    train as the typed keys of group tune ask."""
    if "experiment" in typed:
        return [str(typed["experiment"])]
    recipes = RECIPES.get(kind, RECIPES[""])
    asked = typed.get("tune") or typed.get("tune.kind")
    adapters = any(key.startswith("tune.") for key in typed)
    wanted = [name for name, tune in recipes.items() if (tune == asked if asked else not adapters or tune != "none")]
    return wanted or [*recipes]  # platform.launch refuses what is asked


class Devices(NamedTuple):
    """Devices that a recipe is to fit: how many `workers`, the `memory` of each in bytes (0: as their type has), and
    the `hardware` for which plans are priced. `keys`: configuration keys that name them."""

    workers: int
    memory: float
    hardware: Hardware
    keys: dict[str, Any]


def _find_devices(config: Config, arguments: Namespace) -> Devices:
    """Return the devices that a command line of `platform.tune` names, else all that the cluster of a configuration
    has. Raises ConfigError if there is none."""
    named = read_hardware(arguments.hardware) if arguments.hardware else None
    kind = ("cuda" if named.ahead else "cpu") if named else find_device_kind(config.cluster)
    config = replace(config, cluster=replace(config.cluster, device=kind))
    workers = arguments.workers or count_available_workers(config.cluster)
    if not workers:
        reason = f"no {named.name if named else 'GPU'} is here to be counted"
        raise ConfigError("--workers", workers, reason, [8])
    keys = {"cluster.device": "cuda", "precision": "bf16"} if kind == "cuda" else {}
    if named:
        return Devices(workers, named.memory, named, {**keys, "cluster.hardware": arguments.hardware})
    device = find_worker_device(config, kind, workers)
    hardware = choose_pricing_hardware(config, device.name if device and kind == "cuda" else "")
    return Devices(workers, device.memory if device else 0.0, hardware, keys)


def _choose_recipe(
    experiments: Sequence[str], keys: Mapping[str, Any], typed: Mapping[str, Any], arguments: Namespace
) -> tuple[str, list[str]]:
    """Choose the experiment with which a run in its directory was begun, else the first that fits the devices; return
    its name with the reason, and the words of its command. `keys`: configuration keys beside the `typed` ones. Raises
    ConfigError with the mistakes of all if none can be run."""

    def format_words(experiment: str, more: Mapping[str, Any]) -> list[str]:
        """Return the arguments of platform.launch for an experiment of a tuning, with `more` keys."""
        chosen = {"+experiment": experiment, **keys, "parallel.zero": -1, **more}
        untyped = {key: value for key, value in chosen.items() if key.lstrip("+") not in typed}
        return [*(f"{key}={_quote_if_needed(value)}" for key, value in untyped.items()), *arguments.overrides]

    composed = compose_config(format_words(experiments[0], {}), arguments.config_dir)
    refuse_all(violations_of_sources(composed.data, vocab=composed.model.vocab))
    devices = _find_devices(composed, arguments)
    candidates, lacks = {}, {}
    if devices.keys.get("cluster.device") != "cuda":  # host memory is all that there is
        experiments = [name for name in experiments if not name.endswith(OFFLOAD)] or experiments
    for experiment in experiments:
        words = format_words(experiment, devices.keys)
        try:
            candidates[experiment] = words, compose_config(words, arguments.config_dir)
        except ConfigError as error:
            lacks[experiment] = error.violations[0]
    begun = {name: candidate for name, candidate in candidates.items() if _has_begun(candidate[1])}
    for experiment, (words, config) in (begun or candidates).items():
        try:
            needed = _predict_needed_memory(config, devices)
        except ConfigError as error:
            lacks[experiment] = error.violations[0].partition(": ")[2]
            continue
        if arguments.workers:
            words = format_words(experiment, {**devices.keys, "parallel.data": config.parallel.data})
        if begun:
            return f"{experiment}, with which the run in {config.run.dir} was begun", words
        others = "".join(f"; {name}: {lack}" for name, lack in lacks.items())
        trained = TRAINED[config.tune.kind]
        size = f"{format_number(needed)}B on each of {format_count(devices.workers, 'worker')}"
        return f"{experiment}, as {trained} take {size}{others}", words
    raise ConfigError([f"{name}: {lack}" for name, lack in lacks.items()])


def _quote_if_needed(value: Any) -> str:
    """Return a value of a key as an argument of platform.launch has it."""
    return str(value) if PLAIN.fullmatch(str(value)) else quote_value(str(value))


def _has_begun(config: Config) -> bool:
    """Return True if the directory of a tuning's run holds one that trains the same: weights, or adapters of a kind."""
    with suppress(Malformed, OSError):  # whoever reads the directory refuses it
        stored = read_configuration(Path(config.run.dir))
        return stored is not None and stored.tune.kind == config.tune.kind
    return False


def _predict_needed_memory(config: Config, devices: Devices) -> float:
    """Return the bytes that a tuning's neediest worker takes under the quickest plan that fits its `devices`, of which
    the open keys are chosen in place. Raises ConfigError if none does."""
    if chosen := choose_plan(config, devices.workers, devices.memory, devices.hardware):
        assert chosen.quickest_fitting_finalist
        return chosen.quickest_fitting_finalist.peak_memory
    plan = make_plan(config, devices.workers)
    config.parallel.data = plan.num_replicas
    needed, memory = predict_peak_bytes(config, plan), memory_of_worker(config, devices.memory, devices.hardware)
    if needed > memory:
        raise ConfigError(f"its plan: needs {needed / 1e9:.4g} GB, and a worker has {memory / 1e9:.4g} GB")
    return needed


if __name__ == "__main__":
    sys.exit(QuickExit().run(main))
