"""What makes a run this run, and what of it may change when the run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from platform.boundary.redaction import redact
from platform.config.fields import Config, closest, violation

# Keys of the identity that `resume.allow` can free: what leaves every saved tensor, every sample and their order as
# they are. The corpus itself is compared by its hash, always.
MAY_CHANGE = {
    "optimizer": ("lr", "betas", "eps", "weight_decay", "clip", "schedule", "warmup_steps", "min_lr"),
    "model": ("dropout", "fused_dropout", "label_smoothing"),
    "data": ("kind", "path", "target_path"),
}
FREE = [f"{group}.{name}" for group, names in MAY_CHANGE.items() for name in names]
_ORDER = "samples or their order would be others: some would come twice, some never"
_BECAUSE = (  # why the others are fixed; the first that the key begins with
    ("optimizer.kind", "the saved moments are another optimizer's"),
    ("model.length", _ORDER),
    ("model.source_length", _ORDER),
    ("model.", "the saved tensors are another model's"),
    ("", _ORDER),
)


def identity(config: Config) -> dict[str, Any]:
    """Everything that a directory or checkpoint of another run has otherwise (design.md, section 7); no secrets."""
    values = config.to_dict()
    data = {k: v for k, v in values["data"].items() if k != "cache"}
    own = {
        "model": values["model"],
        "data": data,
        "seed": config.seed,
        "train.global_batch": config.train.global_batch,
        "optimizer": values["optimizer"],
    }
    return redact(own)


def completed(there: Mapping[str, Any]) -> dict[str, Any]:
    """Fills what an earlier version stored of an identity: keys that it did not have with their defaults, and without
    the secrets that it kept. A group that is not there at all stays away."""
    known = identity(Config())
    return {
        key: {**known[key], **value} if isinstance(value, dict) and isinstance(known.get(key), dict) else value
        for key, value in redact(there).items()
    }


def differences(there: Any, here: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """What differs between two nested maps of plain values: key -> (there, here); None where there is no such key."""
    if there == here or not isinstance(there, dict | None) or not isinstance(here, dict | None):
        return {} if there == here else {prefix: (there, here)}
    there, here = there or {}, here or {}
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(there.keys() | here.keys()):
        found |= differences(there.get(key), here.get(key), f"{prefix}.{key}" if prefix else key)
    return found


def refusal(there: Mapping[str, Any], config: Config, key: str, value: Any, what: str) -> list[str]:
    """What of the identity `there` is not that of `config`, nor freed by `resume.allow`, as a violation of `key`: a
    first line, which names the cure where there is one, and one line per difference. [] if nothing is."""
    allow = config.resume.allow
    found = {k: v for k, v in differences(completed(there), identity(config)).items() if not _freed(k, allow)}
    if not found:
        return []
    cure = f", or go on with resume.allow=[{','.join([*allow, *found])}]" if found.keys() <= {*FREE} else ""
    lines = (
        f"{k}: {a} there, {b} here" + ("" if k in FREE else f"; fixed: {_reason(k)}") for k, (a, b) in found.items()
    )
    return [violation(key, value, f"{what}{cure}. What differs:"), *lines]


def wrong_allowances(config: Config) -> Iterator[str]:
    """One line for everything in `resume.allow` that it cannot free."""
    known = differences({}, identity(config))
    for key in config.resume.allow:
        if key in FREE or key in MAY_CHANGE:
            continue
        reason = _reason(key) if key in known else "no key of a run's identity; others may change without it"
        legal = closest(key, [*FREE, *MAY_CHANGE])[:3]
        yield violation("resume.allow", key, reason, legal)


def _freed(key: str, allow: Sequence[str]) -> bool:
    return key in FREE and (key in allow or key.partition(".")[0] in allow)


def _reason(key: str) -> str:
    return next(why for start, why in _BECAUSE if key.startswith(start))
