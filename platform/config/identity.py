"""Identity of a run: the keys that must stay the same when it resumes, the keys that `resume.allow` may free, and the
default run directory, which is derived from the configuration, so that the same command resumes the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from platform.boundary.redaction import redact
from platform.boundary.refusals import closest, violation
from platform.config.fields import Config, loss_of, short_hash

# Keys of the identity that `resume.allow` can free: changing them leaves the saved tensors, the samples and their order
# as they are. The corpus itself is always compared by its hash.
MAY_CHANGE = {
    "optimizer": "lr betas eps nesterov newton_schulz matrix_lr beta2_decay update_clip relative_step scale_by_weight"
    " least_scale groups weight_decay clip schedule warmup_steps min_lr cycles decay_steps settings schedule_settings",
    "model": "dropout fused_dropout label_smoothing capacity_factor balance_loss balance_rate z_loss router_jitter"
    " position_rows",
    "data": "kind path target_path sources tokenizer chat_template settings",
    "train": "init init_averaged length_ramp loss loss_settings",
}
FREE = [f"{group}.{name}" for group, names in MAY_CHANGE.items() for name in names.split()]
_ORDER = "samples or their order would be others: some would come twice, some never"
_BECAUSE = (  # (prefix of a key, why it is fixed); the first prefix that matches counts
    ("optimizer.", "the saved moments are another optimizer's"),
    ("model.length", _ORDER),
    ("model.source_length", _ORDER),
    ("model.", "the saved tensors are another model's"),
    ("train.freeze", "the saved moments belong to other weights"),
    ("train.ema", "the saved averages are others"),
    ("", _ORDER),
)
_NOT_OF_DATA = ("cache", "foreign_tokenizer")  # where tokens lie, and a word about how a run began
_OF_TRAIN = (
    *("global_batch", "ramp_from", "ramp_by", "ramp_samples", "length_ramp"),
    *("loss", "loss_settings", "init", "init_averaged", "freeze", "ema"),
)
_OF_SHARES = ("weight", "epochs", "validation", "streaming")  # keys of a mixture's source that say which samples it has
_MOST = 100  # directories of one experiment to search for a run
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def identity(config: Config) -> dict[str, Any]:
    """Return the configuration's values by which a run is the same run (docs/contract.md), nested, without secrets."""
    values = config.to_dict()
    data = {k: v for k, v in values["data"].items() if k not in _NOT_OF_DATA}
    data["input_field"] = "" if data["input_field"] == "none" else data["input_field"]  # the same prompts
    train = {f"train.{name}": values["train"][name] for name in _OF_TRAIN} | {"train.loss": loss_of(config)}
    own = {"model": values["model"], "data": data, "seed": config.seed, **train, "optimizer": values["optimizer"]}
    return redact(own)


def completed(there: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a run (`identity`: the keys that may not differ when it is resumed), as an earlier version
    of this package stored it, with the keys that it lacks set to their defaults, and secrets redacted.

    A group that is missing altogether stays missing.
    """
    known = identity(Config())
    return {key: value for key, value in known.items() if not isinstance(value, dict)} | {
        key: {**known[key], **value} if isinstance(value, dict) and isinstance(known.get(key), dict) else value
        for key, value in redact(there).items()
    }


def differences(there: Any, here: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Compare two nested maps of plain values, such as a stored configuration (`there`) and the present one (`here`):
    return key, joined by dots, -> (value there, value here) where they differ, None for a missing key. `prefix` is the
    key of the two maps themselves."""
    if there == here or not isinstance(there, dict | None) or not isinstance(here, dict | None):
        return {} if there == here else {prefix: (there, here)}
    there, here = there or {}, here or {}
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(there.keys() | here.keys()):
        found |= differences(there.get(key), here.get(key), f"{prefix}.{key}" if prefix else key)
    return found


def violations_of_identity(there: Mapping[str, Any], config: Config, key: str, value: Any, what: str) -> list[str]:
    """Return why a run with the stored identity `there` cannot resume under `config`; [] if it can.

    Compares all identity keys that `resume.allow` does not free. The first line refuses the place of the stored run,
    `key`=`value` such as run.dir=DIRECTORY, for the reason `what`, and names a sufficient `resume.allow` if there is
    one; then comes one line per difference.
    """
    allow = config.resume.allow
    found = {k: v for k, v in differences(completed(there), identity(config)).items() if not _freed(k, allow)}
    if not found:
        return []
    free = [_freeable(key) for key in found if _curable(key)]
    named = ",".join(dict.fromkeys([*allow, *free]))
    cure = f", or go on with resume.allow=[{named}]" if len(free) == len(found) else ""
    lines = (
        f"{k}: {a} there, {b} here" + ("" if _curable(k) else f"; fixed: {_reason(k)}") for k, (a, b) in found.items()
    )
    return [violation(key, value, f"{what}{cure}. What differs:"), *lines]


def violations_of_allowances(config: Config) -> Iterator[str]:
    """Yield a refusal line for each entry of the user's list `resume.allow` that names no key, and no group of
    keys, which may differ when a run is resumed (`MAY_CHANGE`)."""
    known = differences({}, identity(config))
    for key in config.resume.allow:
        if key in FREE or key in MAY_CHANGE:
            continue
        reason = _reason(key) if key in known else "no key of a run's identity; others may change without it"
        legal = closest(key, [*FREE, *MAY_CHANGE])[:3]
        yield violation("resume.allow", key, reason, legal)


def _freed(key: str, allow: Sequence[str]) -> bool:
    """Return True if the user's list `resume.allow` lets the value of `key` differ when a run is resumed."""
    free = _freeable(key)
    return bool(free) and (free in allow or key.partition(".")[0] in allow)


def _freeable(key: str) -> str:
    """Return the entry of FREE, keys that resume.allow may free, that `key` is or lies in; "" if there is none."""
    return next((free for free in FREE if f"{key}.".startswith(f"{free}.")), "")


def _curable(key: str) -> bool:
    """Return True if `resume.allow` lets a run go on with another value of a key: it may free a mixture's sources,
    whose files may lie elsewhere, but a source's share decides about the samples."""
    return bool(_freeable(key)) and not (key.startswith("data.sources.") and key.rpartition(".")[2] in _OF_SHARES)


def _reason(key: str) -> str:
    """Return why a run cannot be resumed with another value of `key`, as text for the user."""
    return next(why for start, why in _BECAUSE if key.startswith(start))


def default_directory(config: Config, experiment: str) -> str:
    """Return the run directory of a command that names none: `runs/EXPERIMENT-HASH`, the hash being over the
    configuration without secrets, so that the same command resumes the same run.

    If that does not exist, returns the directory in which an earlier version, which hashed other keys, began this run.
    """
    values = _of_the_run(config)
    found = Path("runs") / f"{experiment}-{short_hash(values)}"
    if not found.is_dir():
        older = sorted(Path("runs").glob(f"{experiment}-{'[0-9a-f]' * 12}"))[:_MOST]
        found = next((path for path in older if _began_as(path, values)), found)
    return str(found)


def _of_the_run(config: Config) -> dict[str, Any]:
    """Return the values of a configuration that name its default run directory, nested, without secrets and without
    keys that a resumed run may set otherwise, such as `train.stop_at`."""
    values: dict[str, Any] = redact(config.to_dict())
    for key in ("run", "resume"):  # a resumed run is the same run
        del values[key]
    del values["train"]["stop_at"], values["checkpoint"]["resume"], values["checkpoint"]["on_stop"]
    del values["data"]["foreign_tokenizer"]
    if not isinstance(config.checkpoint.every, int):  # a duration does not affect the steps
        values["checkpoint"]["every"] = 0
    return values


def _began_as(path: Path, values: Mapping[str, Any]) -> bool:
    """Return True if config.yaml in the run directory `path` has the values `values` (of `_of_the_run`), keys unknown
    to its version being at their defaults. The number of replicas may differ where `values` leaves it to the workers
    (-1)."""
    try:
        there = _of_the_run(Config.from_dict(yaml.load((path / "config.yaml").read_bytes(), _LOADER)))  # noqa: S506
    except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError):
        return False
    as_many = {"parallel.data"} if values["parallel"]["data"] == -1 else set()
    return not differences(there, values).keys() - as_many
