"""Trial of hints: a value that a refusal line names as nearest legal is one with which the whole configuration is
legal, but for the user's other mistakes. No formula says a second time which values are legal: the code that refuses a
configuration judges it with the hint, too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from operator import attrgetter
from typing import Any

import yaml

from platform.boundary.refusals import NEAREST, find_refused_key
from platform.config import fields
from platform.config.fields import KEYS, Config

BESIDE = "legal beside other values of"  # the words before keys, where no hint alone is legal
_BETWEEN = re.compile(r", (?:or )?(?![^\[{]*[\]}])")  # hints
_ARGUMENT = re.compile(r"[a-z_]+(\.\w+)*=\S*( [a-z_]+(\.\w+)*=\S*)*")
ListRefusals = Callable[[Config], list[str]]  # of a configuration: the lines that refuse it


def keep_legal_hints(config: Config, lines: Sequence[str], list_refusals: ListRefusals) -> list[str]:
    """Return the refusal lines of a configuration, each with its legal hints, as judged by `list_refusals`."""
    if fields.violations_of_types(config) or not any(NEAREST in line for line in lines):
        return [*lines]
    mistakes = Counter(map(_refused_part, lines)) | Counter(map(_refused_part, list_refusals(config)))
    return [_rewrite_line(config, list_refusals, mistakes, line) for line in lines]


def _rewrite_line(config: Config, list_refusals: ListRefusals, mistakes: Counter[str], line: str) -> str:
    """Return a refusal line with its legal hints or, without any, the keys that must change too; names are kept."""
    reason, _, hints = line.partition(NEAREST)
    typed_hints = [] if ": no such " in line else [*_typed_hints(line)]
    new_keys = {typed: _find_new_keys(config, list_refusals, mistakes, line, typed) for typed in typed_hints}
    if not any(new_keys.values()):
        return line
    comma, prefix = (", or ", "") if " or " in hints else (", ", f"{find_refused_key(line)}=")
    if legal := [typed.removeprefix(prefix) for typed, keys in new_keys.items() if not keys]:
        return f"{reason}{NEAREST}{comma.join(legal)}{''.join(hints.partition('; ')[1:])}"
    keys = dict.fromkeys(key for keys in new_keys.values() for key in keys)
    return f"{reason}; {BESIDE} {', '.join(keys)}: {hints}"


def _find_new_keys(
    config: Config, list_refusals: ListRefusals, mistakes: Counter[str], line: str, typed: str
) -> list[str]:
    """Return the keys for which a configuration is refused, beyond the user's other `mistakes`, with the arguments
    `typed`, a hint of `line`; [] for arguments that only a command line can read."""
    changed, refused = deepcopy(config), _refused_part(line)
    if not all([_apply_argument(changed, line, argument) for argument in re.split(r" (?=[a-z_.]+=)", typed)]):
        return []
    cured = mistakes[refused] if find_refused_key(typed) == find_refused_key(line) else 1
    allowed = Counter(map(find_refused_key, (mistakes - Counter({refused: cured})).elements()))
    return [*(Counter(map(find_refused_key, list_refusals(changed))) - allowed)]


def _refused_part(line: str) -> str:
    """Return the KEY=VALUE that a refusal line is about."""
    return re.split(": | is not ", line, maxsplit=1)[0]


def _typed_hints(line: str) -> Iterator[str]:
    """Yield each hint of a refusal line as the arguments that a user types."""
    for hint in filter(None, _BETWEEN.split(line.partition(NEAREST)[2].partition("; ")[0])):
        key = find_refused_key(line)
        for text in hint.split(" or "):
            typed = text if _ARGUMENT.fullmatch(text) else f"{key}={text}"
            key = find_refused_key(typed)
            yield typed


def _apply_argument(config: Config, line: str, argument: str) -> bool:
    """Set what an argument KEY=VALUE says in a configuration, in place; in a list, the value of the entry that `line`
    refuses. Return False if only a command line can read the argument."""
    key, _, text = argument.partition("=")
    key = "pipeline.kind" if key == "pipeline" else key
    group, _, name = key.rpartition(".")
    if group in ("tensor.axes", "branch.axes") and text.isdecimal():
        axes = attrgetter(group)(config)
        axes[name] = int(text)
        if re.search(" has no (such axis|axes)", line):  # the hint stands for the whole argument
            del axes[find_refused_key(line).rpartition(".")[2]]
        return True
    if key not in KEYS or isinstance(old := attrgetter(key)(config), dict) or re.match(r"[^[]\S* ", text):  # words
        return False
    if isinstance(old, list) and text[:1] != "[":
        refused = line.removeprefix(f"{key}=").partition(": ")[0]
        value: Any = [*dict.fromkeys(text if entry == refused else entry for entry in old)]
    else:
        value = text.removeprefix("''") if fields.find_declared_type(key) is str else yaml.safe_load(text)
    fields.set_value(config, key, value)
    return True
