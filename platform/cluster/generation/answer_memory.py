"""Memory that answers need at least, by the plan, and the memory that there is: a request that cannot be served is
refused before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from platform.boundary.refusals import violation
from platform.cluster.crew.base.job import gpu_count
from platform.cluster.run.devices import machine_memory
from platform.config.fields import Config, Model
from platform.plan.core.passes import ROOM
from platform.plan.core.plan import Plan
from platform.plan.language.layout import padded
from platform.plan.language.numbers import count_of
from platform.plan.memory.hardware import memory_of

_LOGIT = 8  # bytes: tokens are chosen in double precision


def violations_of_memory(config: Config, plan: Plan, rows: int, tokens: int, beams: int) -> Iterator[str]:
    """Yield a refusal line if the workers have too little memory together to generate `rows` texts at a time, each of
    `tokens` with its answer and so many `beams`: weights, keys and values, and logits, each counted once."""
    weights = plan.parameter_count * plan.itemsize["compute"]
    row = _bytes_of_row(config.model, padded(tokens, ROOM), plan.itemsize["compute"])
    needed, there = weights + row * rows * beams, _memory(config, plan.mesh.size)
    if needed <= there:
        return
    fit = max(0, int((there - weights) // row))
    wanted = f"{needed / 1e9:,.1f} GB for {count_of(rows, 'text')} at a time"
    why = f"needs at least {wanted}, and there are {there / 1e9:,.1f} GB"
    if beams > 1:
        yield violation("--beams", beams, why, [fit // rows] if fit >= rows else ["--batch=1"] * (rows > 1))
    elif rows > 1:
        yield violation("--batch", rows, why, [fit] if fit else [])
    else:
        yield violation("CHECKPOINT", config.train.init, why, ["more workers"])


def _bytes_of_row(model: Model, tokens: int, itemsize: int) -> int:
    """Return the bytes that a text of so many `tokens` takes as a model generates it: keys, values and logits."""
    d_kv = model.d_kv or model.d_model // model.heads
    width = (model.kv_heads or model.heads) * (d_kv + (model.d_value or d_kv))
    seen = tokens + (model.source_length or model.length) * (model.kind == "encoder_decoder")
    return model.layers * seen * width * itemsize + model.vocab * _LOGIT


def _memory(config: Config, workers: int) -> float:
    """Return the bytes of memory that all workers have to generate texts; inf if unknown before they start."""
    cluster = config.cluster
    if cluster.gpu and (of_one := memory_of(cluster.gpu)):
        return of_one * workers
    if cluster.kind in ("inline", "processes") and cluster.device != "cuda" and not gpu_count():
        return machine_memory()
    return inf
