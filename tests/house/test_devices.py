"""What runs on a device: nothing waits for it but where it is said, and every tensor is made on the device that is
said."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PLATFORM = Path(__file__).parents[2] / "platform"
ROOMS = ("runtime", "train")
WAITS = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero", "masked_select", "is_nonzero", "equal", "unique"}
FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "randint", "tensor", "zeros"}

# file:function -> why it may
MAY_WAIT = {
    "runtime/communicator.py:read_numbers": "the one place in which a step waits for its device",
    "runtime/communicator.py:read_copy": "the same, for numbers alone that are on their way to the host",
    "runtime/clock.py:_read_times": "reads events, after that",
    "runtime/communicator.py:sum_numbers": "host memory",
    "runtime/host_memory.py:all_gather_texts": "host memory",
    "runtime/host_memory.py:broadcast_text": "host memory",
    "runtime/compilation.py:_explain_why_compiler_fails": "tries the compiler, before a generation forms",
    "runtime/normal_floats.py:sum_scales": "weights are stored before any step",
    "train/generator.py:extend_beams": "beams are chosen on the host",
    "train/generator.py:_share_numbers": "answers are sent to the driver",
    "train/generator.py:_build_continuation": "tokens are sent to the driver",
    "train/generator.py:score_texts": "answers are sent to the driver",
    "train/worker.py:rank_classes": "answers are sent to the driver",
    "train/measurements.py:_time_once": "a measurement, outside of any step",
    "train/measurements.py:synchronize_device": "a measurement, outside of any step",
    "train/measurements.py:_time_collective": "a measurement, outside of any step",
    "train/measurements.py:count_false_elements": "a measurement, outside of any step",
    "train/state_recovery.py:_is_unchanged": "replicas are compared between steps",
    "train/state_recovery.py:compare_replicas": "replicas are compared between steps",
    "train/rank_parameters.py:compute_rank_ranges": "host memory",
    "train/step_report.py:combine_reports": "host memory",
    "train/worker.py:leave": "a worker that leaves waits for its device",
}
MAY_MAKE = {
    "runtime/communicator.py:start_reading": "host memory",
    "runtime/communicator.py:<module>": "the processor's vector mathematics, before threads exist",
    "runtime/host_memory.py:_bytes_tensor": "host memory",
    "runtime/host_memory.py:_connect_group": "host memory",
    "runtime/communicator.py:sum_numbers": "host memory",
    "runtime/host_memory.py:all_gather_texts": "host memory",
    "runtime/host_memory.py:broadcast_text": "host memory",
    "runtime/recompute.py:_take_host_bytes": "host memory",
    "runtime/residual.py:random_starts": "one copy sends them to the device",
    "runtime/pinned_memory.py:allocate_pinned_bytes": "host memory",
    "runtime/staged_memory.py:allocate_host_zeros": "host memory",
    "train/rank_parameters.py:__init__": "host memory",
    "train/generator.py:__init__": "rows of tokens, placed later",
    "train/generator.py:build_data": "rows of tokens, placed later",
    "train/generator.py:extend_beams": "beams are chosen on the host",
    "train/generator.py:_search_beams": "beams are chosen on the host",
    "train/generator.py:score_texts": "rows of tokens, placed later",
    "train/generator.py:rank_classes": "answers of the host",
    "train/generator.py:continue_texts": "rows of tokens, placed later",
    "train/state_forms.py:fill_wide": "host memory",
    "train/state_forms.py:_flat_places": "host memory",
    "train/state_forms.py:fetch_numbers": "host memory",
    "train/step_report.py:__init__": "host memory",
    "train/step_report.py:combine_reports": "host memory",
}


def calls(node: ast.AST, function: str = "<module>") -> Iterator[tuple[str, ast.Call]]:
    """Every call in a file, with the innermost named function around it."""
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.FunctionDef) else function
        if isinstance(child, ast.Call):
            yield inner, child
        yield from calls(child, inner)


def waits(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in WAITS


def makes(call: ast.Call) -> bool:
    f = call.func
    torch_s = isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id == "torch"
    return torch_s and f.attr in FACTORIES and all(k.arg != "device" for k in call.keywords)


def find_calls(test, source: str | None = None) -> dict[str, int]:
    """file:function -> the line of the last call for which `test` holds."""
    if source is not None:
        return {function: call.lineno for function, call in calls(ast.parse(source)) if test(call)}
    out = {}
    for file in sorted(file for room in ROOMS for file in (PLATFORM / room).rglob("*.py")):
        name = file.relative_to(PLATFORM).as_posix()
        for function, call in calls(ast.parse(file.read_text())):
            if test(call):
                out[f"{name}:{function}"] = call.lineno
    return out


@pytest.mark.parametrize(("test", "allowed"), [(waits, MAY_WAIT), (makes, MAY_MAKE)])
def test_only_where_it_is_said_why(test, allowed):
    callers = find_calls(test)
    assert callers.keys() == allowed.keys(), "remove what is not there, and let no more come"


def test_negative_controls():
    assert find_calls(waits, "def step(x):\n  return x.sum().item()") == {"step": 2}
    assert find_calls(makes, "def step(x):\n  torch.zeros(3, dtype=d)\n  torch.zeros(1, device=x.device)") == {
        "step": 2
    }
