"""Price of a configuration's step on a hardware of `conf/hardware/`, and its picture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from platform.boundary.documents import parse_yaml, read_bytes
from platform.boundary.refusals import ConfigError, closest_values
from platform.boundary.schema import Malformed
from platform.config.composition import CONF
from platform.config.fields import Config
from platform.config.groups import AUTO
from platform.model import build_model
from platform.optimizer.optimizers import count_stored_numbers, count_streamed_bytes
from platform.plan.accelerators import find_accelerator, nominal_memory
from platform.plan.chunks import BUCKET_MIB
from platform.plan.gantt import draw_gantt_svg
from platform.plan.plan import Plan, base_precision
from platform.plan.simulate import simulate
from platform.plan.step_collectives import may_compile
from platform.predict.bucket_size import choose_bucket_mebibytes
from platform.predict.choose_schedule import build_schedule
from platform.predict.hardware import Hardware, HardwareMistake, parse_hardware
from platform.predict.price import StepPrice, price_work, simulate_schedule
from platform.predict.work import EVEN, Execution, StepWork, step_work

FOLDER = CONF / "hardware"
MOST_DRAWN = 4000  # passes in the picture of a step
_NAME = re.compile(r"[\w .-]+")  # of a type of GPU
_ACCELERATOR = re.compile(r"^accelerator: *([^#\n]*)", re.MULTILINE)  # in a file, which is slow to read as YAML


def names_of_hardware() -> list[str]:
    """Return the names of the hardware that has a file in `conf/hardware/`."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def file_of_hardware(name: str) -> Path:
    """Return the path of the file that describes the hardware `name`, of cluster.gpu's names too, or is called so."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    return path if path.is_file() or path.parent != FOLDER else FOLDER / f"{_find_described_gpu(name) or name}.yaml"


@lru_cache(maxsize=32)
def read_hardware(name: str) -> Hardware:
    """Return the hardware `name` of `conf/hardware/`, or of a file at that path; ConfigError has every mistake."""
    try:
        return parse_hardware(file_of_hardware(name).stem, _read_description(name))
    except HardwareMistake as error:
        raise ConfigError([f"hardware {name}: {line}" for line in error.mistakes]) from None


def _read_description(name: str, readers: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the file of the hardware `name` says, and the one that it is like; `readers`: names of hardware that
    is like it. Raises ConfigError if there is no such file, it is no YAML, or is like itself."""
    if name in readers:
        raise ConfigError(f"hardware {readers[0]}: like={name} is like itself")
    path = file_of_hardware(name)
    if not path.is_file():
        nearest = sorted(closest_values(name, names_of_hardware()), key=lambda other: not other.startswith(name))
        legal = ", ".join(nearest[:3])
        raise ConfigError(f"hardware {name}: there is no such file; legal: {legal}, or the path of a FILE.yaml")
    try:
        parsed = parse_yaml(read_bytes(path))
    except (Malformed, OSError) as error:
        raise ConfigError(f"hardware {name}: is no YAML: {error}") from None
    described = parsed if isinstance(parsed, dict) else {}
    base = _read_description(str(described.pop("like")), (*readers, name)) if "like" in described else {}
    return _merge_descriptions(base, described)


def _merge_descriptions(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a hardware that is as the `base` but for what its `own` says, key by key."""
    parts = {key: value for key, value in own.items() if isinstance(value, dict) and isinstance(base.get(key), dict)}
    return {**base, **own, **{key: _merge_descriptions(base[key], value) for key, value in parts.items()}}


def find_gpu_hardware(gpu: str) -> Hardware | None:
    """Return the hardware of a type of GPU, such as cluster.gpu, None if no file in `conf/hardware/` describes it."""
    name = _find_described_gpu(gpu)
    return read_hardware(name) if name else None


@lru_cache(maxsize=32)
def _find_described_gpu(gpu: str) -> str:
    """Return the name of the file in `conf/hardware/` that describes a type of GPU, "" if none does."""
    gpu_accelerator = find_accelerator(gpu) if _NAME.fullmatch(gpu) else None
    for name in names_of_hardware() if gpu_accelerator else ():
        described = _ACCELERATOR.search((FOLDER / f"{name}.yaml").read_text())
        if described and find_accelerator(described[1]) == gpu_accelerator:
            return name
    return ""


def read_chosen_hardware(config: Config) -> Hardware | None:
    """Return the hardware that cluster.hardware names, None if it leaves that to the device. Raises ConfigError if no
    file has that name or path, or its speed in the run's precision is not known."""
    name = config.cluster.hardware
    if name == AUTO:
        return None
    key = "cluster.hardware"
    if not file_of_hardware(name).is_file():
        legal = [*closest_values(name, [AUTO, *names_of_hardware()])[:3], "the path of a FILE.yaml"]
        raise ConfigError(key, name, "there is no such file", legal)
    hardware = read_hardware(name)
    if (precision := base_precision(config.precision)) not in hardware.peaks:
        raise ConfigError(key, name, f"its peaks lack {precision}, in which the run computes", [AUTO])
    return hardware


def violations_of_hardware(config: Config) -> list[str]:
    """Return the lines that refuse the file of cluster.hardware."""
    try:
        read_chosen_hardware(config)
    except ConfigError as error:
        return error.violations
    return []


def set_hardware_device(config: Config) -> None:
    """Set the kind of device of a configuration in place, if it is open and cluster.hardware has only one kind."""
    if (chosen := read_chosen_hardware(config)) and chosen.ahead and config.cluster.device == AUTO:
        config.cluster.device = "cuda"


def hardware_of_device(config: Config, device: str, gpu: str) -> Hardware | None:
    """Return the hardware of a run's workers: the one of cluster.hardware, or of their `device` (cpu | cuda) and `gpu`;
    None if no file describes it, or its speed in the run's precision."""
    hardware = read_chosen_hardware(config) or (read_hardware("cpu") if device == "cpu" else find_gpu_hardware(gpu))
    return hardware if hardware and base_precision(config.precision) in hardware.peaks else None


def choose_bucket_size(config: Config, plan: Plan) -> int:
    """Return the MiB of gradients in a bucket of a configuration's plan. Raises ConfigError for the hardware's file."""
    if config.parallel.bucket_mib == AUTO and plan.zero == 3:
        return 0  # it is there to hold little: block by block
    size = read_bucket_size(config)
    return choose_bucket_mebibytes(plan, cast(Hardware, _find_named_hardware(config))) if size is None else size


def chooses_narrow_gathers(config: Config, plan: Plan) -> bool:
    """Return True if ZeRO-3 gathers weights of a configuration's plan in 8 bits: where it can, and makes no step slower
    on the hardware that is named (quantise.gather=auto). Raises ConfigError for the hardware's file."""
    narrow = replace(plan, gathers_tiles=True)
    if config.quantise.gather == "off" or not any(b.tiles for b in narrow.buckets):
        return False
    if read_narrow_gathers(config) == "on":
        return True
    hardware = cast(Hardware, _find_named_hardware(config))
    return step_price(config, narrow, hardware).seconds <= step_price(config, plan, hardware).seconds


def read_narrow_gathers(config: Config) -> str:
    """Return whether ZeRO-3 gathers weights in 8 bits where it can: on, off, or auto where the hardware says."""
    if config.quantise.gather != AUTO:
        return config.quantise.gather
    hardware = _find_named_hardware(config)
    return AUTO if hardware and base_precision(config.precision) in hardware.peaks else "on"


def read_bucket_size(config: Config) -> int | None:
    """Return the MiB of gradients in a bucket of all plans of a configuration, but for ZeRO-3; None where links say."""
    if not isinstance(config.parallel.bucket_mib, str):
        return config.parallel.bucket_mib
    return None if _find_named_hardware(config) else BUCKET_MIB


def _find_named_hardware(config: Config) -> Hardware | None:
    """Return the hardware that cluster.hardware or cluster.gpu names, None if neither names one that is described."""
    return read_chosen_hardware(config) or find_gpu_hardware(config.cluster.gpu)


def choose_pricing_hardware(config: Config, gpu: str = "") -> Hardware:
    """Return the hardware for which plans are priced: as cluster.hardware says, of this `gpu`, of cluster.gpu, or the
    usual one."""
    if chosen := read_chosen_hardware(config):
        return chosen
    c = config.cluster
    kinds = ["h100", "cpu"] if c.device == "cuda" or c.gpu else ["cpu", "h100"]
    candidates = [find_gpu_hardware(name) for name in (gpu, c.gpu) if name] + [read_hardware(name) for name in kinds]
    known = [hardware for hardware in candidates if hardware and base_precision(config.precision) in hardware.peaks]
    return known[0]


def memory_of_worker(config: Config, memory: float, hardware: Hardware) -> float:
    """Return the bytes of a worker's device: as the configuration states, as seen (`memory`), or as its type has."""
    return config.cluster.device_memory * 1e9 or memory or nominal_memory(config.cluster.gpu) or hardware.memory


def step_price(config: Config, plan: Plan, hardware: Hardware) -> StepPrice:
    """Predict the seconds of a training step of a configuration under its plan on a hardware."""
    return price_work(build_step_work(config, plan), hardware)


def build_step_work(config: Config, plan: Plan, **others: Any) -> StepWork:
    """Return the work of a training step of a configuration under its plan, which any hardware can price. `others`:
    fields of Execution in which another system that runs the plan differs."""
    kind = config.pipeline.kind
    execution = Execution(
        schedule=kind,
        table=build_schedule(config, plan.num_replicas, plan.pairs_passes)
        if kind not in EVEN or plan.pairs_passes
        else None,
        overlap=config.parallel.overlap,
        moments=count_stored_numbers(config),
        streamed=count_streamed_bytes(config),
        dropout=config.model.dropout,
        fused_dropout=config.model.fused_dropout,
        compiles=may_compile(config.train.compile, "cuda"),
        **others,
    )
    return step_work(plan, build_model(config.model), execution)


def step_configs(config: Config, on_gpu: bool, tiny: bool) -> list[Config]:
    """Return the configurations of the steps that each worker measures alone: of a model whose steps are all launches,
    with more and more microbatches, and last one of two usual layers. `tiny`: True if that one is small too."""
    m, t = config.model, config.train
    small = replace(m, layers=2, d_model=16, heads=2, length=8, vocab=32)
    usual = replace(m, layers=2, d_model=4096, heads=32, length=2048, vocab=32768)
    if not on_gpu:
        usual = replace(m, layers=2, d_model=256, heads=4, length=128, vocab=512)
    sizes = [(small, 1, n) for n in (1, 4, 16)] + [(small if tiny else usual, 2 if on_gpu else 4, 2)]
    parallel = replace(config.parallel, data=1)
    groups = [(model, replace(t, microbatch=each, global_batch=each * n)) for model, each, n in sizes]
    return [replace(config, model=model, parallel=parallel, train=train) for model, train in groups]


def draw_step(config: Config, plan: Plan, hardware: Hardware | None) -> str:
    """Draw what each pipeline stage does when in a step of a configuration under its plan, as the text of an SVG image:
    in the predicted seconds of a hardware, or in nominal ones without. Of a step with more than MOST_DRAWN passes, one
    of fewer microbatches is drawn."""
    chunks, each = len(plan.chunks), plan.sizes["batch"]
    most = max(1, MOST_DRAWN // (2 * chunks * plan.num_stages)) * plan.num_stages
    drawn = plan.microbatches if config.pipeline.kind == "file" else min(plan.microbatches, most)
    shorter = replace(config, train=replace(config.train, global_batch=drawn * each, ramp_from=0))
    schedule = build_schedule(config if drawn == plan.microbatches else shorter, plan.num_replicas, plan.pairs_passes)
    work = build_step_work(config, plan) if hardware else None
    simulation = simulate_schedule(work, hardware, schedule) if work and hardware else simulate(schedule)
    some = f", {drawn} of {plan.microbatches} microbatches" if drawn < plan.microbatches else ""
    when = f"predicted on {hardware.name}" if hardware else "with backward passes twice as long as forward ones"
    title = f"{schedule.name}{some}, bubble {simulation.bubble:.1%}, {when}"
    return draw_gantt_svg({title: simulation.timeline}, unit="s" if hardware else "")
