"""Shapes of the workers' answers to calls, as far as the driver relies on them; a member whose answer has another shape
is treated as dead.
"""

from __future__ import annotations

from typing import Any

from platform.cluster.wire.messages import Shape, a_count, a_name, a_text, a_truth, anything, fits


def is_answer(method: str, rank: int, value: Any) -> bool:
    """Return True if `value` is a valid answer of `rank` to a call of `method`."""
    return fits(value, REPORT if method == "step" and not rank else ANSWERS.get(method, anything))


def _number(value: Any) -> bool:
    return type(value) in (int, float)  # a loss may be infinite or NaN


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _or_none(shape: Shape) -> Shape:
    return lambda value: value is None or fits(value, shape)


def _each(shape: Shape, length: int | None = None) -> Shape:
    return lambda value: (
        isinstance(value, list) and length in (None, len(value)) and all(fits(item, shape) for item in value)
    )


def _values(shape: Shape) -> Shape:
    return lambda value: isinstance(value, dict) and all(fits(item, shape) for item in value.values())


def _having(**shapes: Shape) -> Shape:
    """Return the shape of an object with at least these keys."""
    return lambda value: isinstance(value, dict) and all(k in value and fits(value[k], s) for k, s in shapes.items())


REPORT = _having(  # rank 0's answer to `step`; see platform.train.step.step_report
    step=a_count,
    loss=_number,
    grad_norm=_number,
    lr=_number,
    skipped=a_truth,
    tokens=a_count,
    samples=_each(a_count, 2),
    seconds=_values(_number),
    comm_bytes=_values(a_count),
    peak_memory_bytes=a_count,
    world_size=lambda value: a_count(value) and value > 0,
    slow=_each(lambda value: fits(value, _each(_number, 2)) and a_count(value[0])),
)
ANSWERS: dict[str, Shape] = {
    "prove": _having(node=a_name, sees=_values(a_text), code=_values(a_text), versions=_values(a_text)),
    "form": _having(rank=a_count, pid=a_count, node=a_name),
    "build": _having(parameters=a_count, device=a_text, memory=_or_none(a_count)),
    "step": _having(step=a_count),
    "evaluate": _having(val_loss=_number),
    "sample": a_text,
    "snapshot": _having(tensors=_values(_each(a_count)), values=_object),
    "written": _or_none(_object),
    "restore": _values(a_text),
}
