"""Hints of refused plans, each followed: alone it is refused for nothing new, and one by one they end in a plan.

A case draws the keys that share mesh axes, sizes and lengths. What is refused is mended as a user would: each hint of
each line, then the first hint of the first line that comes next, in as many refusals as the first one had lines, and
MORE. A line that says in words that more must change ends it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from unittest import mock

from platform import launch
from platform.boundary.refusals import ConfigError, find_refused_key
from platform.config.composition import Composer, open_composer
from platform.predict.legal_hints import BESIDE
from platform.predict.make_plan import make_plan
from tests.hints.follow_hints import applied, hints

MORE = 2  # refusals beyond the lines of the first one
CLASSES = ("legal", "one line", "two lines", "more lines", "in words")
SCHEMES = ("serial", "1d", "1d", "1d_sp", "2d", "2p5d")
OF_EXPERTS = ("parallel.tensor_experts", "parallel.experts", "model.capacity_factor", "parallel.lent_experts")
WORDS = (BESIDE, "; legal: ", "no multiple of", "the other axes' product")


def drawn(r: Random) -> list[str]:
    """Draw the arguments of a command."""
    scheme, heads = r.choice(SCHEMES), r.choice((4, 4, 6, 8, 12, 3))
    typed = {
        "tensor": scheme,
        "model.heads": heads,
        "model.d_model": r.choice((heads * 4, heads * 8, heads * 12, 48, 96)),
        "model.d_ff": r.choice((48, 48, 96, 72, 100)),
        "model.length": r.choice((24, 48, 48, 64)),
        "model.layers": r.choice((2, 3, 4)),
        "model.vocab": 96,
        "parallel.data": r.choice((1, 2, 2, 4)),
        "train.global_batch": 24,
        "train.microbatch": r.choice((2, 4, 12, 3)),
    }
    axes = {"1d": "t", "1d_sp": "t", "2d": "rc", "2p5d": "rcd"}.get(scheme, "")
    more: dict[str, Callable[[], object]] = {
        **{f"tensor.axes.{axis}": lambda: r.choice((1, 2, 2, 2, 3, 4)) for axis in axes},
        "model.d_kv": lambda: r.choice((4, 8, 6)),
        "model.kv_heads": lambda: r.choice((1, 2, 3, heads)),
        "model.experts": lambda: r.choice((2, 3, 4, 6, 8)),
        "parallel.tensor_experts": lambda: r.choice(("whole", "split")),
        "parallel.experts": lambda: r.choice((1, 2, 3)),
        "model.capacity_factor": lambda: r.choice((0, 1.25)),
        "pipeline": lambda: r.choice(("gpipe", "1f1b", "interleaved", "zb_h1")),
        "parallel.context": lambda: r.choice((2, 2, 3, 4)),
        "parallel.context_kind": lambda: r.choice(("auto", "gather", "ring", "heads", "heads")),
        "parallel.context_heads": lambda: r.choice((0, 2, 3)),
        "parallel.context_pieces": lambda: r.choice((0, 2, 3, 4)),
        "train.length_ramp": lambda: f"[0:{r.choice((1, 2, 3, 4, 6, 8))},10:{typed['model.length']}]",
        "parallel.zero": lambda: r.choice((0, 1, 2, 3)),
        "parallel.zero_group": lambda: r.choice((0, 1, 2, 4)),
        "parallel.lent_experts": lambda: r.choice((0, 1, 3)),
        "parallel.bucket_mib": lambda: r.choice((0, 0.01, 25, "auto", "big")),
        "tensor.uneven": lambda: r.choice(("true", "false")),
        "tensor.async_products": lambda: r.choice(("on", "off")),
        "train.pair_passes": lambda: r.choice(("on", "off")),
        "recompute": lambda: r.choice(("full", "selective")),
    }
    share = r.choice((0.05, 0.1, 0.2))
    typed |= {key: value() for key, value in more.items() if key.startswith("tensor.axes") or r.random() < share}
    if "model.experts" not in typed:  # one mistake is enough
        typed = {key: value for key, value in typed.items() if key not in OF_EXPERTS or r.random() < 0.1}
    if "pipeline" in typed or r.random() < 0.05:
        typed["pipeline.stages"] = r.choice((1, 2, 2, 3, 4))
        typed |= {"pipeline.chunks": r.choice((1, 2, 3, 5))} if r.random() < 0.4 else {}
    return ["+experiment=gpt_quick", *(f"{key}={value}" for key, value in typed.items())]


def refused(arguments: Sequence[str]) -> list[str]:
    """Return the refusal lines of a command that plans, none if it has a plan."""
    try:
        make_plan(launch.compose_config(arguments))
    except ConfigError as error:
        return error.violations
    return []


def mended(arguments: list[str], line: str, typed: str) -> list[str]:
    """Return the arguments with a hint of a line typed; in a list, in the place of the entry that the line refuses."""
    key, _, value = typed.partition("=")
    old = next((a for a in arguments if a.startswith("train.length_ramp=")), "")
    if key == "train.length_ramp" and value != "[]" and "," in old:
        refused_entry, entry = line.partition("=")[2].partition(": ")[0], value.strip("[]")
        entries = [entry if part == refused_entry else part for part in old.partition("=")[2].strip("[]").split(",")]
        typed = f"{key}=[{','.join(entries)}]"
    return applied(arguments, key, typed)


def follow(lines: Sequence[str], arguments: list[str], line: str, typed: str) -> bool:
    """Follow one hint of a line, then the first of what comes next; return whether it ends in a plan, not in words."""
    known = Counter(map(find_refused_key, lines)) - Counter([find_refused_key(line)])
    now = mended(arguments, line, typed)
    left = refused(now)
    news = Counter(map(find_refused_key, left)) - known
    assert not news, f"{typed}, a hint of {line!a}, leads to {left!a}"
    shown = [typed]
    for _ in range(len(lines) + MORE):
        if not left:
            return True
        after = next(((each, argument) for each in left for _, argument in hints(each)), None)
        if after is None:
            assert all(any(word in each for word in WORDS) for each in left), f"{shown}: no hint in {left!a}"
            return False
        shown.append(after[1])
        now = mended(now, *after)
        left = refused(now)
    raise AssertionError(f"{shown} end in {left!a}")


@contextmanager
def opened() -> Iterator[Callable[[int], str]]:
    """Yield `attempt`, with Hydra open."""
    with open_composer(None):
        composer = Composer([], {})

        @contextmanager
        def again(*arguments: object) -> Iterator[Composer]:
            yield composer

        with mock.patch.object(launch, "open_composer", again):
            yield attempt


def attempt(seed: int) -> str:
    """Check the case that a seed draws; return its class."""
    arguments = drawn(Random(seed))
    try:
        lines = refused(arguments)
        followed = [follow(lines, arguments, line, typed) for line in lines for _, typed in hints(line)]
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} for {' '.join(arguments)}") from error
    if not all(followed):
        return "in words"
    return ("legal", "one line", "two lines", "more lines")[min(len(lines), 3)]
