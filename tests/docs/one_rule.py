"""Generated parts of docs/one-rule.md: the rule's answer to each equation, and the output of each command.

`python -m tests.docs.one_rule` writes them into the page.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout
from unittest.mock import patch

from platform.plan.__main__ import main
from platform.plan.layout import Layout
from platform.plan.rule import COLLECTIVES, Conversion, RelayoutStep, contract_layouts, partial_axes
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "one-rule.md"
PARAMETERS = "WV"
_TENSOR = r"(\w)\[([^\]]*)\](?:@(\w))?"
_EQUATION = re.compile(rf"{_TENSOR} = {_TENSOR} \. {_TENSOR}")
_RULE = re.compile(r"```rule\n(.*?)```", re.S)
_COMMAND = re.compile(r"(\$ python -m platform\.plan ([^|\n]*) \| grep \"([^\"]*)\"\n).*?```", re.S)
_COLUMNS = ("forward", "backward")
Tensor = tuple[str, tuple[str, ...], Layout]  # name, dims, layout


def tensor(name: str, dims: str, only: str | None) -> Tensor:
    """Read `A[I_zx, J]@g`: the dims, and for each its axes, major to minor."""
    split = [word.partition("_") for word in dims.split(", ")]
    return (
        name,
        tuple(dim for dim, _, _ in split),
        Layout.build_canonical({d: tuple(axes) for d, _, axes in split}, only or ()),
    )


def moves(name: str, dims: Sequence[str], steps: Sequence[RelayoutStep]) -> list[str]:
    """Return one word per collective of `steps`, e.g. `AllGather_x(W, M)`; slices are free."""

    def word(step: RelayoutStep) -> str:
        moved = name if step.op in ("all_reduce", "broadcast", "reduce") else f"{name}, {dims[step.dim]}"
        return f"{step.op.title().replace('_', '')}_{''.join(step.axes)}({moved})"

    return [word(step) for step in steps if step.op in COLLECTIVES]


def answer(equation: str) -> tuple[str, str]:
    """Return what the rule moves for an equation, forward and backward. Raises ValueError for an illegal layout."""
    match = _EQUATION.fullmatch(equation)
    assert match, equation
    parts = match.groups()
    out, *inputs = (tensor(*parts[i : i + 3]) for i in (0, 3, 6))
    c = contract_layouts([(dims, layout, name in PARAMETERS) for name, dims, layout in inputs], out[1:])
    ways: list[tuple[Tensor, Conversion]] = [*zip(inputs, c.inputs, strict=True), (out, c.output)]
    forward = [word for (name, dims, _), way in ways for word in moves(name, dims, way.forward)]
    backward = [word for (name, dims, _), way in reversed(ways) for word in moves(f"d{name}", dims, way.backward)]
    for name, _, layout in inputs:
        if name in PARAMETERS and (axes := partial_axes(layout, c.axes)):
            backward.append(f"d{name} partial over {', '.join(axes)}")
    return ", ".join(forward) or "-", ", ".join(backward) or "-"


def table(block: str) -> str:
    """Return the lines of a `rule` block with the rule's answer beside each equation."""
    equations = [line.partition("   ")[0].rstrip() for line in block.splitlines() if " = " in line]
    rows = [("", *_COLUMNS), *((equation, *answer(equation)) for equation in equations)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "```rule\n" + "\n".join(lines) + "\n```"


def printed(arguments: str, pattern: str) -> str:
    """Return the lines that `python -m platform.plan ARGUMENTS` prints and that match `pattern`."""
    out = io.StringIO()
    with redirect_stdout(out), patch("sys.argv", ["platform.plan", *shlex.split(arguments)]):
        assert main() == 0
    return "\n".join(line for line in out.getvalue().splitlines() if re.search(pattern, line))


def generate(page: str) -> str:
    """Return the page with every generated part made anew."""
    page = _RULE.sub(lambda match: table(match[1]), page)
    return _COMMAND.sub(lambda match: f"{match[1]}{printed(match[2], match[3])}\n```", page)


if __name__ == "__main__":
    PAGE.write_text(generate(PAGE.read_text()))
