"""Every legal layout of a small Transformer computes what one process computes, in fp64.

A map gives each dim an ordered list of mesh axes. Restricted to one of its axes a legal map stays legal, so the legal
maps of a mesh are found among the combinations of those of one axis (`test_candidates_miss_nothing` tries all).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, islice, permutations, product
from typing import Any

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.predict.make_plan import make_plan
from tests.harness.oracle import configure, prove

DIMS = ("batch", "length", "memory_length", "heads", "d_kv", "d_ff", "vocab", "d_model")
REGIONS = ("stream", "attention", "core", "mlp", "logits")
ROLES = ("in", "out", "vector")
SIZES = {"layers": 1, "d_model": 8, "heads": 8, "d_kv": 8, "d_ff": 8, "length": 8, "vocab": 23}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt_untied": {"tied": False},
    "llama": {"kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False,
              "tied": False},
}  # fmt: skip

PARTS = 16  # of the long test of all layouts: each is short enough for the time limit of one test
Map = dict[str, list[str]]


def model(axes: str, rules: Mapping[str, Any], name: str = "gpt") -> Config:
    sizes = {**SIZES, **MODELS[name]}
    return configure("layout", dict.fromkeys(axes, 2), rules=rules, microbatch=8, global_batch=8, **sizes)


def per_region(axes: str, rules: Mapping[str, Map], name: str) -> Config:
    """A map of its own for each of REGIONS and ROLES."""
    c = model(axes, {}, name)
    c.tensor.regions = {r: rules[r] for r in REGIONS}
    c.tensor.parameters = {r: rules[r] for r in ROLES}
    return c


def legal(c: Config) -> bool:
    try:
        make_plan(c)
    except ConfigError:
        return False
    return True


@cache
def on_one_axis() -> tuple[frozenset[str], ...]:
    """The sets of dims that one axis may split."""
    sets = (frozenset(dims) for n in range(len(DIMS) + 1) for dims in combinations(DIMS, n))
    return tuple(dims for dims in sets if legal(model("a", {d: ["a"] for d in dims})))


def orders(split: Sequence[frozenset[str]], axes: str) -> Iterator[Map]:
    """The maps in which axis i splits the dims `split[i]`, in every order of the axes of each dim."""
    lists = {d: [a for a, dims in zip(axes, split, strict=True) if d in dims] for d in DIMS}
    used = {d: on for d, on in lists.items() if on}
    for chosen in product(*(permutations(on) for on in used.values())):
        yield {d: list(on) for d, on in zip(used, chosen, strict=True)}


@cache
def candidates(axes: str) -> tuple[Map, ...]:
    return tuple(m for split in product(on_one_axis(), repeat=len(axes)) for m in orders(split, axes))


def draw(r: random.Random, axes: str) -> Map:
    split = [r.choice(on_one_axis()) for _ in axes]
    return r.choice(list(orders(split, axes)))


def check(c: Config, layout: Any) -> None:
    try:
        prove(c)
    except Exception as error:
        raise AssertionError(f"layout {layout}: {error}") from error


def check_all(layouts: Sequence[Map], axes: str, name: str = "gpt") -> None:
    for layout in layouts:
        check(model(axes, layout, name), layout)


def test_one_axis(record_count):
    layouts = on_one_axis()
    record_count("layouts on mesh (2)", len(layouts), len(layouts), f"all legal ones of {2 ** len(DIMS)}")
    assert len(layouts) >= 20
    for name in ("gpt", "llama"):
        check_all([{d: ["a"] for d in dims} for dims in layouts], "a", name)


def test_a_sample_of_two_axes(record_count):
    every = candidates("ab")
    drawn = random.Random(0).sample(every, len(every))
    sample = list(islice((m for m in drawn if legal(model("ab", m))), 12))
    record_count("layouts on mesh (2, 2)", len(sample), len(every), f"the candidates among {5 ** len(DIMS)}")
    check_all(sample, "ab")


def test_a_sample_of_three_axes(record_count):
    r = random.Random(0)
    sample = [m for m in (draw(r, "abc") for _ in range(4)) if legal(model("abc", m))]
    record_count("layouts on mesh (2, 2, 2)", len(sample), 4, "a seeded sample, the legal ones")
    check_all(sample, "abc")


def check_regions(seed: int, count: int, record_count) -> None:
    r = random.Random(seed)
    ran = 0
    for _ in range(count):
        axes, name = r.choice(["ab", "ab", "abc"]), r.choice(list(MODELS))
        rules = {place: draw(r, axes) for place in (*REGIONS, *ROLES)}
        c = per_region(axes, rules, name)
        if legal(c):
            check(c, rules)
            ran += 1
    assert ran
    record_count("layouts with a map per region and role", ran, count, "a seeded sample, the legal ones")


def test_a_map_per_region(record_count):
    check_regions(0, 10, record_count)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_layout_of_two_axes(part, record_count):
    layouts = [m for m in candidates("ab") if legal(model("ab", m))]
    mine = layouts[part::PARTS]
    record_count(f"layouts on mesh (2, 2), part {part}", len(mine), len(layouts), f"together all, in {PARTS} parts")
    check_all(mine, "ab")


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 5))
def test_a_large_sample_of_three_axes(seed, record_count):
    r = random.Random(seed)
    sample = [m for m in (draw(r, "abc") for _ in range(50)) if legal(model("abc", m))]
    record_count(f"layouts on mesh (2, 2, 2), seed {seed}", len(sample), 50, "a seeded sample, the legal ones")
    check_all(sample, "abc")


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 5))
def test_a_large_sample_of_maps_per_region(seed, record_count):
    check_regions(seed, 50, record_count)


@pytest.mark.full
def test_candidates_miss_nothing():
    """Of all maps that give a dim at most one of two axes, the plan accepts just those among the candidates."""
    accepted = {
        on
        for on in product((None, "a", "b"), repeat=len(DIMS))
        if legal(model("ab", {d: [a] for d, a in zip(DIMS, on, strict=True) if a}))
    }
    simple = [m for m in candidates("ab") if all(len(on) == 1 for on in m.values())]
    assert accepted == {tuple(m.get(d, [None])[0] for d in DIMS) for m in simple if legal(model("ab", m))}


def test_a_tied_table_split_for_the_logits_alone():
    """The lookup leaves a whole gradient, the head one block of it: they are gathered, not summed."""
    rules: dict[str, Map] = {place: {} for place in (*REGIONS, *ROLES)}
    for logits in ({"vocab": ["a"]}, {"vocab": ["b", "a"]}, {"vocab": ["b"], "length": ["a"]}):
        check(per_region("ab", {**rules, "logits": logits}, "gpt"), logits)


def test_rotary_positions_where_d_kv_is_split():
    for layout in ({"d_kv": ["a"]}, {"d_kv": ["a", "b"]}, {"heads": ["a"], "d_kv": ["b"]}):
        check(model("ab", layout, "llama"), layout)
