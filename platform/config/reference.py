"""Reference of all keys, made of their declarations: `python -m platform.config.reference` prints the page
`docs/configuration.md`, and `--help` ends with the same keys.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import Field
from typing import Any, NamedTuple

from platform.config.fields import Config, list_key_fields, read_declared_types
from platform.config.key import Key, describe_type

_WIDTH = 118  # characters of a line of `--help`
_INDENT = 36  # its column where the meaning of a key begins
_PAGE = (
    "# Configuration\n\n"
    "Every key of a run, as `platform/config/fields.py` and `platform/config/groups.py` declare it: "
    "type `KEY=VALUE` after `+experiment=NAME`, or write it in a file of your own (`--config-dir`). "
    "`python -m platform.launch --help` shows the same. Rules that relate keys are in `platform/config/`. "
    "A value that breaks one of them is refused with the nearest legal ones. "
    "(`python -m platform.config.reference` prints this page.)\n"
)


class Entry(NamedTuple):
    """Row of the reference of configuration keys: full name, type and default in words, and declaration."""

    name: str
    type: str
    default: str
    key: Key


def render_page() -> str:
    """Render the text of `docs/configuration.md`, the reference of all configuration keys: one table per group."""
    groups = list(_iterate_groups())
    contents = ", ".join(f"[{name}](#{name})" for name, _, _ in groups if name)
    lines = [_PAGE, f"Groups: [none](#the-run-as-a-whole), {contents}.", ""]
    for group, says, entries in groups:
        lines += [f"## {group or 'The run as a whole'}", "", says, ""]
        lines += ["| key | type | default | legal | meaning |", "|---|---|---|---|---|"]
        for name, kind, default, key in entries:
            cells = [f"`{name}`", kind, f"`{default}`", key.describe_legal_values(), key.guidance]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def render_summary() -> str:
    """Render the reference of all configuration keys that ends `--help` in a terminal: default, meaning and legal
    values of each."""
    lines = []
    for group, says, entries in _iterate_groups():
        lines += ["", f"{group}: {says}" if group else says]
        for name, _, default, key in entries:
            legal = f" ({key.describe_legal_values()})" if key.describe_legal_values() else ""
            start = f"  {name}={default}".ljust(_INDENT - 1) + " "
            lines += textwrap.wrap(start + key.guidance + legal, _WIDTH, subsequent_indent=" " * _INDENT)
    return "\n".join(lines[1:])


def _iterate_groups() -> Iterator[tuple[str, str, list[Entry]]]:
    """Yield each group of configuration keys: (name, docstring of its class, rows of its keys); "" for no group."""
    fields = list_key_fields()
    for group, kind in {"": Config, **read_declared_types(Config)[1]}.items():
        hints, _ = read_declared_types(kind)
        group_fields = {name: f for name, f in fields.items() if name.rpartition(".")[0] == group}
        entries = [_build_entry(name, f, hints[f.name]) for name, f in group_fields.items()]
        yield group, (group and inspect.getdoc(kind)) or "Keys without a group.", entries


def _build_entry(name: str, f: Field[Any], hint: Any) -> Entry:
    """Make the row of configuration key `name` in the reference from its field and the field's type `hint`."""
    default = f.default_factory() if callable(f.default_factory) else f.default
    shown = default if isinstance(default, str) and default else json.dumps(default)
    return Entry(name, describe_type(hint), shown, f.metadata["key"])


if __name__ == "__main__":
    print(render_page(), end="")
