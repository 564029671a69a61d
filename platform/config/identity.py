"""Identity of a run: the keys that must stay the same when it resumes, the keys that `resume.allow` may free, and the
default run directory, which is derived from the configuration, so that the same command resumes the same run; and where
its checkpoints are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from platform.boundary.redaction import redact_secrets, strip_url_secrets
from platform.boundary.refusals import closest_values, format_violation
from platform.config.fields import KEYS, Config, hash_values, training_loss_name
from platform.config.groups import AUTO

# Keys of the identity that `resume.allow` can free: changing them leaves the saved tensors, the samples and their order
# as they are. The corpus itself is always compared by its hash. Of group optimizer, all that are not declared fixed.
FREE = [key for key, legal in KEYS.items() if legal.identity == "free"]
HORIZON = "train.steps"  # no key of the identity: `resume.allow` may name it, as another one moves the learning rate
FREE_GROUPS = sorted({key.partition(".")[0] for key in FREE}, reverse=True)
# keys of a mixture's source that say which samples it has
_OF_SHARES = ["weight", "epochs", *(key.removeprefix("data.") for key in KEYS if KEYS[key].identity == "share")]
_ORDER = "samples or their order would be others: some would come twice, some never"
_BECAUSE = (  # (prefix of a key, why it is fixed); the first prefix that matches counts
    ("optimizer.", "the saved moments are another optimizer's"),
    ("model.length", _ORDER),
    ("model.source_length", _ORDER),
    ("model.", "the saved tensors are another model's"),
    ("train.freeze", "the saved moments belong to other weights"),
    ("tune.", "the saved adapters are others"),
    ("train.ema", "the saved averages are others"),
    ("", _ORDER),
)
STATE_FORMS = ("moments", "masters", "offload")  # keys of group optimizer that say how its state lies in memory
_MOST = 100  # directories of one experiment to search for a run
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def run_identity(config: Config) -> dict[str, Any]:
    """Return the configuration's values by which a run is the same run (docs/contract.md), nested, without secrets."""
    values = config.to_dict()
    data = {k: v for k, v in values["data"].items() if KEYS[f"data.{k}"].identity != "none"}
    data["input_field"] = "" if data["input_field"] == "none" else data["input_field"]  # the same prompts
    flat = ((group, k, v) for group in ("train", "tune") for k, v in values[group].items())
    train = {f"{group}.{k}": v for group, k, v in flat if KEYS[f"{group}.{k}"].identity}
    first = {"model": values["model"], "data": data, "seed": config.seed}
    return redact_secrets(
        {**first, **train, "train.loss": training_loss_name(config), "optimizer": values["optimizer"]}
    )


def complete_identity(stored_identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a run (`run_identity`: the keys that may not differ when it is resumed), as an earlier
    version of this package stored it, with the keys that it lacks set to their defaults, and secrets redacted.

    A group that is missing altogether stays missing.
    """
    known = run_identity(Config())
    return {key: value for key, value in known.items() if not isinstance(value, dict)} | {
        key: {**known[key], **value} if isinstance(value, dict) and isinstance(known.get(key), dict) else value
        for key, value in redact_secrets(stored_identity).items()
    }


def find_differences(stored: Any, present: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Compare two nested maps of plain values, such as a stored configuration (`stored`) and the present one
    (`present`): return key, joined by dots, -> (value there, value here) where they differ, None for a missing key.
    `prefix` is the key of the two maps themselves."""
    if stored == present or not isinstance(stored, dict | None) or not isinstance(present, dict | None):
        return {} if stored == present else {prefix: (stored, present)}
    stored, present = stored or {}, present or {}
    differing: dict[str, tuple[Any, Any]] = {}
    for key in sorted(stored.keys() | present.keys()):
        differing |= find_differences(stored.get(key), present.get(key), f"{prefix}.{key}" if prefix else key)
    return differing


def violations_of_identity(
    stored_identity: Mapping[str, Any], config: Config, key: str, value: Any, reason: str
) -> list[str]:
    """Return why a run with the stored identity `stored_identity` cannot resume under `config`; [] if it can.

    Compares all identity keys that `resume.allow` does not free. The first line refuses the place of the stored run,
    `key`=`value` such as run.dir=DIRECTORY, for the reason `reason`, and names a sufficient `resume.allow` if there is
    one; then comes one line per difference.
    """
    allow = config.resume.allow
    differing = find_differences(complete_identity(stored_identity), run_identity(config))
    changes = {k: v for k, v in differing.items() if not _is_change_allowed(k, allow)}
    if not changes:
        return []
    free = [_find_allowable_entry(key) for key in changes if _can_be_allowed(key)]
    named = ",".join(dict.fromkeys([*allow, *free]))
    cure = f", or go on with resume.allow=[{named}]" if len(free) == len(changes) else ""
    fixed = {k: "" if _can_be_allowed(k) else f"; fixed: {_explain_fixed_key(k)}" for k in changes}
    lines = (f"{k}: {a} there, {b} here{fixed[k]}" for k, (a, b) in changes.items())
    return [format_violation(key, value, f"{reason}{cure}. What differs:"), *lines]


def violations_of_allowances(config: Config) -> Iterator[str]:
    """Yield a refusal line for each entry of the user's list `resume.allow` that names no key, and no group of
    keys, which may differ when a run is resumed."""
    known = find_differences({}, run_identity(config))
    for key in config.resume.allow:
        if key in FREE or key in FREE_GROUPS or key == HORIZON:
            continue
        reason = _explain_fixed_key(key) if key in known else "no key of a run's identity; others may change without it"
        legal = closest_values(key, [*FREE, *FREE_GROUPS])[:3]
        yield format_violation("resume.allow", key, reason, legal)


def _is_change_allowed(key: str, allow: Sequence[str]) -> bool:
    """Return True if the entries of the configuration key resume.allow let the value of `key` differ."""
    free, group = _find_allowable_entry(key), key.partition(".")[0]
    # a restore makes one form of the optimizer's state of another
    return key.removeprefix("optimizer.") in STATE_FORMS or bool(free) and (free in allow or group in allow)


def _find_allowable_entry(key: str) -> str:
    """Return the entry of FREE, keys that resume.allow may free, that `key` is or lies in; "" if there is none."""
    return next((free for free in FREE if f"{key}.".startswith(f"{free}.")), "")


def _can_be_allowed(key: str) -> bool:
    """Return True if `resume.allow` lets a run go on with another value of a key: it may free a mixture's sources,
    whose files may lie elsewhere, but a source's share decides about the samples."""
    is_share = key.startswith("data.sources.") and key.rpartition(".")[2] in _OF_SHARES
    return bool(_find_allowable_entry(key)) and not is_share


def _explain_fixed_key(key: str) -> str:
    """Return why a run cannot be resumed with another value of `key`, as text for the user."""
    return next(why for start, why in _BECAUSE if key.startswith(start))


def find_default_directory(config: Config, experiment: str) -> str:
    """Return the value that the configuration key run.dir has by default: `runs/EXPERIMENT-HASH`, the hash being over
    the configuration without secrets, so that the same command resumes the same run.

    If that does not exist, returns the directory in which an earlier version, which hashed other keys, began this run.
    """
    values = _select_directory_hash_values(config)
    run_dir = Path("runs") / f"{experiment}-{hash_values(values)}"
    if not run_dir.is_dir():
        older = sorted(Path("runs").glob(f"{experiment}-{'[0-9a-f]' * 12}"))[:_MOST]
        run_dir = next((path for path in older if _has_directory_hash_values(path, values)), run_dir)
    return str(run_dir)


def _select_directory_hash_values(config: Config) -> dict[str, Any]:
    """Return the values of a configuration that name its default run directory, nested, without secrets and without
    keys that a resumed run may set otherwise, such as `train.stop_at`."""
    values: dict[str, Any] = redact_secrets(config.to_dict())
    for key in ("run", "resume"):  # a resumed run is the same run
        del values[key]
    del values["train"]["stop_at"]
    for key in ("resume", "on_stop", "last"):
        del values["checkpoint"][key]
    del values["data"]["foreign_tokenizer"], values["data"]["unread"]
    if not isinstance(config.checkpoint.every, int):  # a duration does not affect the steps
        values["checkpoint"]["every"] = 0
    return values


def _has_directory_hash_values(path: Path, values: Mapping[str, Any]) -> bool:
    """Return True if config.yaml in the run directory `path` has the values `values` (of
    `_select_directory_hash_values`), keys unknown to its version being at their defaults. Keys that are -1 or auto in
    `values` may differ: a run stores the value that it settled on."""
    try:
        stored_values = _select_directory_hash_values(
            Config.from_dict(yaml.load((path / "config.yaml").read_bytes(), _LOADER))
        )  # noqa: S506
    except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError):
        return False
    return all(present in (-1, AUTO) for _, present in find_differences(stored_values, values).values())


def find_checkpoint_url(config: Config) -> str:
    """Return the URL that a configuration saves checkpoints to: checkpoint.url, else run.dir's `checkpoints`."""
    return config.checkpoint.url or os.path.join(config.run.dir, "checkpoints")


def storage_key(config: Config) -> str:
    """Return the setting KEY=VALUE of a configuration that determines where checkpoints are saved, for messages."""
    key = "checkpoint.url" if config.checkpoint.url else "run.dir"
    return f"{key}={strip_url_secrets(config.checkpoint.url or config.run.dir)}"


def saves_checkpoints(config: Config) -> bool:
    """Return True if a configuration ever saves checkpoints: regularly, at its end or train.stop_at, or on a stop."""
    c = config.checkpoint
    return bool(c.every or c.last or config.train.stop_at or c.on_stop)
