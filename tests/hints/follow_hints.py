"""Following of hints: what a refusal names as the nearest legal is typed in the place of what it refuses, and so on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

LINE = re.compile(
    r"(?P<key>[\w.+/-]+)=(?P<value>.*?)(: .*?| is not divisible .*?); nearest legal: (?P<hint>.*)", re.DOTALL
)
ARGUMENT = re.compile(r"(--)?[a-z_]+([./-][\w.]+)*=.*", re.DOTALL)
NO_KEY = re.compile(": unknown key; | has no such axis; ")  # the hint stands for the whole argument
NAMES = re.compile(r"tensor\.(layout|regions|parameters).*: no such ")  # of which the hint is a part of the value
ENDS = (
    " needs ",
    "no file or folder",
    ": cannot be read (",
    " has no texts ",
    "; its fields",
    " is no list of tokens",
)  # words of lines that say all there is to say
# a line is of one item
LISTS = "elastic.faults model.window_layers resume.allow eval.prompts eval.tasks train.length_ramp plan.search".split()
MOST = 8  # hints in a row


def hints(line: str) -> list[tuple[str, str]]:
    """Return the hints of a line that can be typed, each as (key, argument); none for what is said in words."""
    if not (match := LINE.fullmatch(line)) or NAMES.match(line):
        return []
    out = []
    for item in _items(match["hint"]):
        if ": unknown key; " in line:  # the hints are keys
            item = f"{item}={match['value']}"
        typed = item if ARGUMENT.fullmatch(item) else f"{match['key']}={_value(match['key'], item)}"
        if all(not re.search(r"[A-Z]{4,}|[^,] ", one.partition("=")[2]) for one in _several(typed)):
            out.append((typed.partition("=")[0], typed))
    return out


def _items(hint: str) -> list[str]:
    """Return what a hint names: apart by commas or, of one key that is said once, as in KEY=1 or 2, by `or`."""
    items = []
    for part in re.split(r", (?:or )?(?![^\[{]*[\]}])", hint.partition("; ")[0]):
        first, *others = part.split(" or ")
        key = first.partition("=")[0]
        items += [first, *(other if "=" in other else f"{key}={other}" for other in others)]
    return items


def _several(typed: str) -> list[str]:
    """Return the arguments of a hint: one, or several that go together, as in data=text data.path=a."""
    words = typed.split(" ")
    return words if len(words) > 1 and all(map(ARGUMENT.fullmatch, words)) else [typed]


def _value(key: str, item: str) -> str:
    return f"[{item}]" if key in LISTS and not item.startswith("[") else item


def applied(arguments: Sequence[str], key: str, typed: str) -> list[str]:
    """Return a command's arguments with those of a hint in the place of those that they make wrong."""
    for one in (several := _several(typed))[1:]:
        arguments = applied(arguments, one.partition("=")[0], one)
    group, typed = key.partition(".")[0], several[0]
    wrong = (key, f"{group}.kind" if key == group else key)
    if key == "experiment":
        return [*(a for a in arguments if not a.lstrip("+").startswith("experiment=")), typed]
    kept = [a for a in arguments if a.lstrip("+").partition("=")[0] not in wrong]
    maps = [a for a in kept if "={" in a and key.startswith(f"{a.partition('=')[0]}.")]
    return [*(a for a in kept if a not in maps), typed]


def dead_end(refused: Callable[[Sequence[str]], Sequence[str]], arguments: Sequence[str], line: str) -> str:
    """Follow each hint of a line, then the first of each line that comes next. Return where that ends without another
    hint, "" if it always ends in a command that is accepted or in a hint in words."""
    for _, typed in hints(line):
        key = (line if NO_KEY.search(line) else typed).partition("=")[0]
        now, before = applied(arguments, key, typed), {line}
        for _ in range(MOST):
            lines = refused(now)
            if not lines:
                break
            again = before & set(lines)
            wordless = [each for each in lines if not any(word in each for word in ("nearest legal: ", *ENDS))]
            if again or wordless:
                return f"{typed}: {(sorted(again) or wordless)[0]}"
            before |= set(lines)
            for each in lines:
                if more := hints(each):
                    now = applied(now, *more[0])
            if not any(map(hints, lines)):
                break
        else:
            return f"{typed}: no end after {MOST} hints: {lines[0]}"
    return ""
