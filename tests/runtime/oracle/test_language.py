"""The language is complete enough to write a new model in: every word of it, over split dims, against one process."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.config.layout_rules import parse_layout
from platform.model import build_model
from platform.plan.operations.recorder import Recorder
from platform.plan.rule import Conversion
from platform.predict.footprint import count_saved_elements
from platform.predict.make_plan import make_plan
from tests.harness.language_model import OWN, Language, reference
from tests.harness.oracle import Tokens, compare, configure, prove, run, serial, with_operations
from tests.runtime.test_memory import measured

DIMS = ("batch", "length", "memory_length", "d_model", "d_ff", "vocab", *OWN)
Map = dict[str, list[str]]


def language(axes: str = "", rules: Mapping[str, list[str]] | None = None, **more) -> Config:
    sizes = {"kind": "language", "d_model": 16, "d_ff": 64, "heads": 4, "length": 8, "vocab": 61}
    tensor = "layout" if axes else "serial"
    return configure(tensor, dict.fromkeys(axes, 2), rules=rules, **{**sizes, **more})


def legal(c: Config) -> bool:
    try:
        make_plan(c)
    except ConfigError:
        return False
    return True


@cache
def on_one_axis() -> tuple[frozenset[str], ...]:
    sets = (frozenset(dims) for n in range(len(DIMS) + 1) for dims in combinations(DIMS, n))
    return tuple(dims for dims in sets if legal(language("a", {d: ["a"] for d in dims})))


@cache
def on_two_axes() -> tuple[Map, ...]:
    maps = ({d: [a for a, on in zip("ab", sets, strict=True) if d in on] for d in DIMS} for sets in
            product(on_one_axis(), repeat=2))  # fmt: skip
    return tuple(m for m in maps if legal(language("ab", m)))


def check(c: Config) -> None:
    prove(c)


def check_all(axes: str, maps) -> None:
    for i, rules in enumerate(maps):
        try:
            check(language(axes, rules, dropout=0.1 * (i % 2)))
        except Exception as error:
            raise AssertionError(f"layout {rules}: {error}") from error


def test_equals_plain_pytorch():
    c = language()
    _, (ours,) = run(c)
    batch = Tokens(c).batch("train", 0, c.train.global_batch)
    batch = {name: torch.from_numpy(batch[name]).t() for name in ("tokens", "labels")}
    weights = {n: w.clone().requires_grad_() for n, w in ours.initial.items()}
    loss = reference(weights, **batch)
    loss.backward()
    assert ours.loss == pytest.approx(loss.item(), rel=1e-12)
    for name, w in weights.items():
        assert w.grad.abs().max() > 1e-6, f"{name} does not matter"
        assert torch.allclose(ours.gradients[name], w.grad, rtol=1e-9, atol=1e-13), name


def test_one_axis(record_count):
    layouts = on_one_axis()
    record_count(
        "layouts of the language on mesh (2)", len(layouts), len(layouts), f"all legal ones of {2 ** len(DIMS)}"
    )
    assert {d for dims in layouts for d in dims} == set(DIMS)
    check_all("a", ({d: ["a"] for d in dims} for dims in layouts))


@pytest.mark.full
def test_two_axes(record_count):
    """A sample that splits every dim."""
    maps = on_two_axes()
    sample = random.Random(0).sample(maps, 6)
    record_count("layouts of the language on mesh (2, 2)", len(sample), len(maps), "a seeded sample of the legal ones")
    assert {d for rules in sample for d, axes in rules.items() if axes} == set(DIMS)
    check_all("ab", sample)


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_all_of_two_axes(part):
    check_all("ab", on_two_axes()[part::8])


def test_negative_control_forgotten_reduction():
    """Where a sum over a split dim stays partial, the oracle must fail."""
    c = language("a", {"d_model": ["a"]})
    plan = make_plan(c)
    total = plan.operations["reduce", "total"]
    assert [s.op for s in total.conversions[1].forward] == ["all_reduce"]
    broken = {**plan.operations, ("reduce", "total"): replace(total, conversions=(total.conversions[0], Conversion()))}
    with pytest.raises(AssertionError, match="gradient of|replicas of"):
        compare(c, *run(c, with_operations(plan, broken)), serial(c))


REGIONS = {
    "1d": ("1d", {"t": 2}),
    "1d_sp": ("1d_sp", {"t": 2}),
    "2d": ("2d", {"r": 2, "c": 2}),
    "3d": ("3d", {"x": 1, "y": 2, "z": 2}),
}


@pytest.mark.parametrize("scheme", REGIONS)
def test_layouts_that_differ_by_region(scheme):
    """And beside data parallelism, accumulating, with odd vocab padded."""
    tensor, axes = REGIONS[scheme]
    c = configure(tensor, axes, kind="language", d_model=16, d_ff=64, heads=4, length=8, data=2, microbatch=2)
    check(c)


ON_SUB_GRID_ZERO = {
    "dsp_csub": ["stream", "attention", "parameters"],
    "a loss on it": ["logits"],
    "its own stream": ["stream", "parameters"],
    "all that may be": ["stream", "attention", "mlp", "logits", "parameters"],
}


@pytest.mark.parametrize("scheme", ["1d_sp", "3d"])
@pytest.mark.parametrize("only", ON_SUB_GRID_ZERO)
def test_what_exists_on_sub_grid_zero_alone(only, scheme):
    """Every word hands on absent blocks, whichever regions lack them, and saves what the plan says."""
    tensor, axes = REGIONS[scheme]
    sizes = {"kind": "language", "d_model": 16, "d_ff": 64, "heads": 4, "length": 8}
    c = configure(tensor, axes, branch="dsp_csub", branch_axes={"g": 2}, **sizes)
    c.branch.only = ON_SUB_GRID_ZERO[only]
    check(c)
    plan, saved = measured(c)
    where = (plan.mesh.rank_coordinates(rank) for rank in range(plan.mesh.world_size))
    assert saved == [count_saved_elements(plan, build_model(c.model), at=at).total_elements for at in where]


def test_a_parameter_everywhere_is_not_used_at_zero_alone():
    c = language(branch="dsp_csub", branch_axes={"g": 2})
    c.branch.only = ["stream"]
    with pytest.raises(ConfigError, match="norm stream_gain, a parameter of every rank would be used at index 0 alone"):
        make_plan(c)


@pytest.mark.parametrize("rules", [{}, {"d_ff": ["a"]}, {"length": ["a"]}, {"topic": ["a"]}], ids=str)
def test_saved_for_backward(rules):
    c = language("a", rules)
    plan, saved = measured(c)
    assert max(saved) == count_saved_elements(plan, build_model(c.model)).total_elements


def test_the_model_uses_every_word():
    """But those that belong to attention, positions and the two-layer example."""
    c = language(dropout=0.1)
    recorder = Recorder(make_plan(c).scheme, 0.1)
    Language(c.model).forward(recorder, {name: name for name in Language.inputs})
    assert {o.kind for o in recorder.operations} == {
        "lookup", "one_hot", "project", "einsum", "reduce", "concatenate", "reshape", "norm", "softmax", "relayout",
        "dropout", "recurrence", "cross_entropy",
    }  # fmt: skip


def test_a_maximum_that_several_ranks_hold_shares_its_gradient():
    """As in torch.amax: equal rows of the embedding would show a gradient that is counted twice."""
    from platform.plan.layout import Mesh
    from platform.runtime import statistics
    from tests.harness.threads import run_threads

    x = torch.tensor([[3.0, 1.0, 3.0, 3.0], [0.0, 2.0, 1.0, 2.0]], dtype=torch.float64)
    whole = x.clone().requires_grad_()
    whole.amax(1).sum().backward()

    def work(communicator):
        mine = x.chunk(2, 1)[communicator.rank].clone().requires_grad_()
        statistics.max_over_dims(mine, [1], communicator, ("a",)).sum().backward()
        return mine.grad

    gradient = torch.cat(run_threads(Mesh.arrange_axes({"a": 2}), work), 1)
    assert torch.allclose(gradient, whole.grad)


def test_own_dims_may_be_mapped():
    regions, _ = parse_layout("topic:a;batch:b", ["a", "b"])
    assert regions["mlp"] == {"topic": ["a"], "batch": ["b"]}
    with pytest.raises(ConfigError, match="topik: no such dim; nearest legal: topic"):
        parse_layout("topik:a", ["a"])
