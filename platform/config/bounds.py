"""Legal values of each key by itself: choices, numeric bounds, text patterns, and capabilities that are not built yet.

To add a capability, add its name to the tuple in CHOICES and remove it from NOT_BUILT.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from math import inf
from operator import ge, gt, le, lt
from typing import Any
from unicodedata import category

from platform.config.fields import Config, closest, violation
from platform.plan.language.scheme import GATHERED, SLICE_VIA

WORKERS = 10**6  # most workers in a mesh, and along each of its axes
SECONDS = 10**8  # longest duration (three years): clocks and timers take no more
LONGEST = 10_000  # most characters in one text

CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp64", "fp32", "bf16"),
    "recompute": ("none", "selective", "full"),
    "model.kind": ("decoder", "encoder", "encoder_decoder", "two_layer"),
    "model.fused_dropout": (False,),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.activation": ("gelu", "relu", "swiglu", "geglu"),
    "model.positions": ("learned", "rope", "sinusoidal", "relative"),
    "data.kind": ("stdlib", "text", "pairs", "synthetic"),
    "data.objective": ("", "causal", "masked", "span_denoising", "pairs"),
    "optimizer.kind": ("adamw",),
    "optimizer.schedule": ("constant", "cosine", "inverse_sqrt"),
    "parallel.zero": (0, 1, 3),
    "branch.order": ("inner", "outer"),
    "branch.slice_via": tuple(SLICE_VIA),
    "pipeline.kind": ("none", "gpipe", "1f1b", "interleaved", "zb_h1", "file"),
    "train.on_spike": ("rollback", "skip", "stop"),
    "tensor.gathered": tuple(GATHERED),
    "cluster.kind": ("local", "ray", "processes", "inline"),
    "cluster.device": ("auto", "cpu", "cuda"),
    "cluster.memory": ("refuse", "warn"),
    "monitor.kind": ("console", "wandb"),
}


def allow(key: str, value: Any) -> None:
    """Add a legal value for a key, when a module named in `extend` registers a model, an optimizer or the like."""
    CHOICES[key] = tuple(dict.fromkeys((*CHOICES[key], value)))


NOT_BUILT: dict[tuple[str, Any], str] = {  # (key, value) -> the missing capability, as the user reads it
    ("precision", "fp16"): "float16 with a loss scale",
    ("model.fused_dropout", True): "attention masks drawn inside a fused kernel",
}

BOUNDS: dict[str, str] = {
    "seed": ">= 0",
    "recompute_every": ">= 1",
    "train.steps": ">= 1",
    "train.stop_at": ">= 0",
    "train.global_batch": ">= 1",
    "train.microbatch": ">= 1",
    "model.layers": ">= 1",
    "model.d_model": ">= 1",
    "model.heads": ">= 1",
    "model.kv_heads": ">= 0",
    "model.d_kv": ">= 0",
    "model.d_ff": ">= 0",
    "model.length": ">= 1",
    "model.vocab": ">= 1",
    "model.source_length": ">= 0",
    "model.buckets": ">= 4",
    "model.distance": ">= 1",
    "model.label_smoothing": ">= 0 and < 1",
    "model.io": ">= 1",
    "model.hidden": ">= 1",
    "model.dropout": ">= 0 and < 1",
    "model.rope_theta": "> 0",
    "data.validation": ">= 0 and < 1",
    "optimizer.lr": ">= 0 and < inf",
    "optimizer.betas": ">= 0 and < 1",
    "optimizer.eps": "> 0 and < inf",
    "optimizer.weight_decay": ">= 0 and < inf",
    "optimizer.clip": ">= 0",
    "optimizer.warmup_steps": ">= 0",
    "optimizer.min_lr": ">= 0 and <= 1",
    "tensor.axes": ">= 1",
    "branch.axes": ">= 1",
    "pipeline.stages": ">= 1",
    "pipeline.chunks": ">= 1",
    "checkpoint.keep": ">= 1",
    "checkpoint.keep_every": ">= 0",
    "checkpoint.timeout": ">= 0",
    "train.spike": ">= 0",
    "train.verify_every": ">= 0",
    "run.time_margin": ">= 0",
    "elastic.min_workers": ">= 0",
    "elastic.max_workers": ">= 0",
    "elastic.spares": ">= 0",
    "elastic.wait": ">= 0",
    "elastic.hang_seconds": "> 0",
    "elastic.slow": ">= 0",
    "elastic.attempts": ">= 1",
    "elastic.snapshot_every": ">= 0",
    "eval.every": ">= 0",
    "eval.batches": ">= 1",
    "cluster.wait": ">= 0",
    "cluster.device_memory": ">= 0",
    "cluster.threads": ">= 0",
    "monitor.every": ">= 1",
    "monitor.sample": ">= 0",
}

MOST: dict[str, float] = {  # upper bounds for keys whose BOUNDS have none: beyond them memory, clocks or time run out
    "": 10**12,  # every other number
    "seed": 2**63 - 1,
    "recompute_every": 10_000,
    "train.global_batch": 10**8,
    "train.microbatch": 10**6,
    "model.layers": 1000,
    "model.d_model": 2**20,
    "model.heads": 2**16,
    "model.kv_heads": 2**16,
    "model.d_kv": 2**16,
    "model.d_ff": 2**24,
    "model.length": 2**24,
    "model.source_length": 2**24,
    "model.vocab": 2**24,
    "model.io": 2**24,
    "model.hidden": 2**24,
    "model.buckets": 2**16,
    "optimizer.lr": 1e6,
    "optimizer.eps": 1e6,
    "optimizer.weight_decay": 1e6,
    "parallel.data": WORKERS,
    "tensor.axes": WORKERS,
    "branch.axes": WORKERS,
    "pipeline.stages": 1000,
    "pipeline.chunks": 1000,
    "run.time_margin": SECONDS,
    "checkpoint.timeout": SECONDS,
    "elastic.min_workers": WORKERS,
    "elastic.max_workers": WORKERS,
    "elastic.spares": WORKERS,
    "elastic.wait": SECONDS,
    "elastic.hang_seconds": SECONDS,
    "elastic.attempts": 10**6,
    "eval.batches": 10**6,
    "cluster.wait": SECONDS,
    "cluster.device_memory": 10**6,  # GB
    "cluster.threads": 4096,
    "monitor.sample": 10**6,
}

PATTERNS: dict[str, tuple[str, str]] = {  # key -> (regular expression for its whole text, constraint in words)
    "monitor.project": (r"[^\\/#?%:]{1,128}", "W&B takes 1 to 128 characters, none of them \\ / # ? % :"),
    "extend": (r"[^\W\d]\w*(\.[^\W\d]\w*)*", "must be the name of a module, such as my_package.my_module"),
}


def leaves(config: Config) -> dict[str, Any]:
    """Return every key with its value, flattened: {"seed": 0, "train.steps": 100, "tensor.axes": {}, ...}."""
    out: dict[str, Any] = {}
    for group, value in vars(config).items():
        out |= {f"{group}.{k}": v for k, v in vars(value).items()} if is_dataclass(value) else {group: value}
    return out


def not_built(key: str, value: Any) -> str | None:
    """Return a message naming the missing capability if `value` is planned but not built yet, else None."""
    group = key.removesuffix(".kind").removesuffix(".scheme")
    what = NOT_BUILT.get((group, value))
    return what and f"not built yet ({what})"


def wrong_values(config: Config) -> dict[str, list[str]]:
    """Return the keys whose values are illegal by themselves, each with one line per mistake."""
    return {key: lines for key, value in leaves(config).items() if (lines := list(_single(key, value)))}


def impossible_values(config: Config) -> list[str]:
    """Return the lines of `wrong_values` as one list, in the order of the keys."""
    return [line for lines in wrong_values(config).values() for line in lines]


def _single(key: str, value: Any) -> Iterator[str]:
    if key in CHOICES and value not in CHOICES[key]:
        yield violation(key, value, not_built(key, value) or "unknown", closest(value, CHOICES[key]))
        return
    for name, part in _parts(value):
        where = f"{key}.{name}" if name and isinstance(value, Mapping) else key
        if isinstance(part, str):
            yield from _text(where, key, part)
        elif not isinstance(part, bool) and isinstance(part, int | float):
            yield from _number(f"{key}.{name}".rstrip("."), key, part)


def _parts(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (place, part) for every scalar nested in a value; names in a mapping count as texts, with the place ""."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from ((("", key),) if isinstance(key, str) else ())
            yield from _parts(part, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _parts(part, f"{name}.{number}".lstrip("."))
    else:
        yield name, value


def _number(where: str, key: str, number: float) -> Iterator[str]:
    bounds = BOUNDS.get(key, "")
    broken = [b for b in bounds.split(" and ") if bounds and not _holds(number, *b.split())]
    most = MOST.get(key, MOST[""])
    if broken:
        yield violation(where, number, f"must be {bounds}", [b.split()[1] for b in broken[:1] if "=" in b])
    elif not number <= most:
        yield violation(where, number, f"must be <= {most}", [most])
    elif not bounds and not number >= -most:
        yield violation(where, number, f"must be >= {-most}", [-most])


def _text(where: str, key: str, text: str) -> Iterator[str]:
    pattern, words = PATTERNS.get(key, ("", ""))
    if odd := next((c for c in text if category(c) in ("Cc", "Cs", "Zl", "Zp")), None):
        yield violation(where, text, f"the character U+{ord(odd):04X} does not belong into a text; leave it out")
    elif len(text) > LONGEST:
        yield violation(where, text, f"must have at most {LONGEST:,} characters")
    elif pattern and not re.fullmatch(pattern, text):
        yield violation(where, text, words)


def _holds(number: float, comparison: str, limit: str) -> bool:
    compare: Callable[[float, float], bool] = {">=": ge, ">": gt, "<=": le, "<": lt}[comparison]
    return compare(number, inf if limit == "inf" else float(limit))  # every comparison with NaN is False
