"""The static check passes whatever a planner makes, and sees whatever is changed in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from platform.launch import compose_config
from platform.plan import __main__ as command
from platform.plan.operation_forms import FORMS, Unsound
from platform.plan.operation_plan import Collective
from platform.plan.operations.op import Op
from platform.plan.operations.registry import Ops
from platform.plan.plan import Plan
from platform.plan.plan_check import PlanWalk, find_unsoundness
from platform.predict.make_plan import make_plan
from tests.fuzz import plans
from tests.harness.oracle import CONF, MODELS, configure
from tests.harness.plan_mutants import (
    conversions,
    every_step,
    other,
    twice,
    with_operations,
    with_reductions,
    with_steps,
    without,
)

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
CASES = {
    "one": lambda: configure(),
    "1d": lambda: configure("1d", {"t": 2}, data=2),
    "1d_sp": lambda: configure("1d_sp", {"t": 4}, data=2, **MODELS["llama"]),
    "2d": lambda: configure("2d", {"r": 2, "c": 2}),
    "2d_gather": lambda: configure("2d_gather", {"r": 2, "c": 2}),
    "3d": lambda: configure("3d", {"x": 2, "y": 2, "z": 2}, data=2, zero=3, **MODELS["modern"]),
    "t5": lambda: configure("3d_literal", {"x": 2, "y": 2, "z": 2}, **MODELS["t5"]),
    "slices": lambda: configure("1d", {"t": 2}, branch="dsp_slice", branch_axes={"g": 2}, data=2),
    "sub_grids": lambda: configure("1d", {"t": 2}, branch="dsp_csub", branch_axes={"g": 2}, data=2),
    "zero": lambda: configure("1d", {"t": 2}, data=2, zero=1),
    "experts": lambda: configure("1d", {"t": 2}, data=2, experts_of=2, **MODELS["experts"]),
    "experts of a rank": lambda: configure("1d", {"t": 2}, data=2, **MODELS["experts"]),
    "experts, 2d": lambda: configure("2d", {"r": 2, "c": 2}, data=2, experts_of=2, zero=1, **MODELS["experts"]),
    "rows": lambda: configure("1d_sp", {"t": 2}, data=2, experts_of=2, **MODELS["experts"] | {"capacity_factor": 0.0}),
    "latent": lambda: configure("1d_sp", {"t": 2}, data=2, **MODELS["latent"]),
    "stages": lambda: configure("1d", {"t": 2}, pipeline="1f1b", stages=2),
    "pieces": lambda: configure(context=2, context_kind="gather", context_pieces=4),
}


def drop(axis):
    return lambda axes: [a for a in axes if a != axis]


def add(axis):
    return lambda axes: [*axes, axis]


def turned(steps):
    return [replace(s, dim=s.joined, joined=s.dim) for s in steps]


def field(name, value):
    """Put another value in a field of a planned operation."""
    return lambda planned: replace(planned, **{name: value})


def in_16_bits(planned):
    """Let all collectives of an operation move the compute type."""
    return replace(planned, collectives=tuple(replace(c, dtype="compute") for c in planned.collectives))


def tokens_without(axis):
    """Let an operation read its data tensor whole along an axis."""

    def changed(planned):
        rules = {d: [a for a in axes if a != axis] for d, axes in planned.tokens.items()}
        return replace(planned, tokens=type(planned.tokens).build_canonical(rules))

    return changed


def chunk(number, **fields):
    """Return the change of fields of one chunk of a plan, each a function of the chunk."""

    def changed(plan: Plan) -> Plan:
        one = replace(plan.chunks[number], **{name: value(plan.chunks[number]) for name, value in fields.items()})
        return replace(plan, chunks=tuple(one if c is plan.chunks[number] else c for c in plan.chunks))

    return changed


def buckets(**fields):
    """Return the change of fields of all buckets of a plan."""

    def changed(plan: Plan) -> Plan:
        other = replace(plan)
        other.__dict__["buckets"] = [replace(bucket, **fields) for bucket in plan.buckets]
        return other

    return changed


def step(kind, name, part, way, change):
    return lambda plan: with_operations(plan, kind, name, with_steps(part, way, change))


def operation(kind, name, change):
    return lambda plan: with_operations(plan, kind, name, change)


def summed(name, change):
    return lambda plan: with_reductions(plan, name, change)


UP, DOWN, BIAS = "layers.0.mlp.up", "layers.0.mlp.down", "layers.0.mlp.up_bias"
GAIN = "layers.0.mlp.norm.gain"
GATHER = Collective("all_gather", ("t",), 8, "compute", "forward")
# what is changed -> (plan, change, the line)
MUTANTS = {
    "a gradient is not summed over replicas": (
        "1d", summed(UP, drop("data")), f"project {UP}: gradient of {UP} is partial over data, and never summed there"),
    "a replicated gradient is summed": (
        "1d", summed(GAIN, add("t")), f"norm {GAIN}: gradient of {GAIN} is whole over t, and summed there at the end"),
    "a gradient is summed twice": (
        "1d", summed(UP, add("data")), f"{UP}: its gradient is summed 2 times over data"),
    "gains see parts of a sequence, and are not summed": (
        "1d_sp", summed(GAIN, drop("t")), f"norm {GAIN}: gradient of {GAIN} is partial over t, and never summed"),
    "no f: the gradient of a split product's input": (
        "1d", step("project", UP, "0 x", "backward", without("all_reduce")),
        f"project {UP}: gradient of stream[length batch d_model] is partial over t, and has to be whole"),
    "f twice": (
        "1d", step("project", UP, "0 x", "backward", twice("all_reduce")),
        f"project {UP}: gradient of stream[length batch d_model]: all_reduce takes what is partial, and it is whole"),
    "no g: the sum of a contraction": (
        "1d", step("project", DOWN, "0 0 output", "forward", without("all_reduce")),
        f"project {DOWN}: result stream[length batch d_model] is partial over t, and has to be whole"),
    "a sequence is not gathered": (
        "1d_sp", step("project", "*.attention.query", "0 x", "forward", without("all_gather")),
        "reads stream[length batch d_model], which is split along length beside layers.0.attention.query"),
    "a sequence is gathered along another dim": (
        "1d_sp", step("project", "*.attention.query", "0 x", "forward", other("all_gather", dim=1)),
        "all_gather over t joins batch, which is split over data"),
    "a result is scattered along another dim": (
        "1d_sp", step("project", "*.mlp.down", "0 0 output", "forward", other("reduce_scatter", dim=2)),
        "is split along d_model over t, and has to be split along length"),
    "a weight is gathered over another axis": (
        "2d_gather", step("project", UP, "0 0 operand", "forward", other("all_gather", axes=("c",))),
        "all_gather over c joins d_model, which is split over r"),
    "a norm of a split width": (
        "2d", operation("norm", GAIN, field("over", ())), f"norm {GAIN}: merges d_model over no axis, and it is split"),
    "a softmax of a split vocabulary": (
        "1d", operation("cross_entropy", "*", field("over", ())), "merges vocab over no axis, and it is split over t"),
    "statistics that nobody lists": (
        "1d", operation("cross_entropy", "*", field("collectives", ())), "merges statistics of vocab over t"),
    "labels of all replicas": (
        "1d", operation("cross_entropy", "*", tokens_without("data")), "labels has batch split over no axis"),
    "ids of all replicas": (
        "1d", operation("lookup", "*", tokens_without("data")), "result stream[length batch d_model]"),
    "rows that other ranks have": (
        "1d", operation("lookup", "*", field("over", ())), "has vocab split over t, what it makes over no axis"),
    "KV heads that ranks share": (
        "1d_sp", step("expand_kv", "*", "0", "backward", without("all_reduce")),
        "gradient of core[length batch kv_heads d_kv] is partial over t"),
    "a collective that nobody lists": (
        "1d", operation("project", UP, field("collectives", ())), "lists 0 and takes 1 times all_reduce"),
    "a collective that nobody takes": (
        "1d", operation("shift", BIAS, field("collectives", (GATHER,))),
        "lists 1 and takes 0 times all_gather of 8 elements over t in its forward pass"),
    "scores that are summed in 16 bits": (
        "experts, 2d", operation("project", "*.mlp.router", in_16_bits),
        "lists 1 and takes 0 times all_reduce of 128 elements over c in its forward pass, in the compute type"),
    "a sum of tokens that nobody takes": (
        "experts of a rank", step("combine", "*", "2", "forward", without("all_reduce")),
        "result stream[length batch d_model] is partial over t, and has to be whole"),
    "a gradient of tokens that nobody sums": (
        "experts of a rank", step("dispatch", "*", "0", "backward", without("all_reduce")),
        "gradient of stream[length batch d_model] is partial over t, and has to be whole"),
    "parts of rows that nobody joins": (
        "rows", step("dispatch_rows", "*", "3", "forward", without("all_gather")),
        "is split along d_model over t, and has to be whole"),
    "gradients of parts of slots that nobody sums": (
        "experts", step("dispatch", "*", "2", "backward", without("reduce_scatter")),
        "is partial over t, and has to be split along d_model"),
    "weights of a part of the sum": (
        "experts", step("combine", "*", "1", "backward", without("all_reduce")),
        "gradient of stream[length batch experts] accumulate is partial over t"),
    "choices of experts that ranks with the same tokens both count": (
        "experts", operation("route", "*", field("compute_axes", ("data", "expert", "t"))),
        "computes on expert, and says on data+expert+t"),
    "an all-to-all the other way": (
        "slices", step("relayout", "*", "0", "forward", turned),
        "all_to_all"),
    "a sub-grid waits for another": (
        "sub_grids", step("lookup", "*", "1", "forward", lambda steps: [replace(s, only=()) for s in steps]),
        "is taken at index 0 of no axis, not of g"),
    "shards of another axis than gradients are summed over": (
        "zero", buckets(sharded=("t",)), "reduce_scatter takes what is partial, and it is whole over t"),
    "shards of experts over the ranks that have others": (
        "experts, 2d", buckets(sharded=("expert",), shards=2), "takes what is partial, and it is whole over expert"),
    "a tied table whose copies go apart": (
        "stages", lambda plan: replace(plan, stages_of={**plan.stages_of, "embedding": (0,)}),
        "embedding: used in stages [0, 1], its gradient is summed over [0]"),
    "weights that a span does not gather": (
        "3d", chunk(0, spans=lambda c: c.spans[:1]), "no span of chunk 0 has it"),
    "an activation that nobody receives": (
        "stages", chunk(1, receives=lambda c: ()), "chunk 1 receives"),
    "a loss of one chunk too many": (
        "stages", lambda plan: chunk(0, operations=lambda c: {**c.operations, **{
            k: o for k, o in plan.chunks[1].operations.items() if k[0] == "cross_entropy"}})(plan),
        "the loss is computed in 2 chunks, so that it counts 2 times"),
    "pieces of two rounds that are joined as those of one": (
        "pieces", step("relayout", "layers.0.attention.key", "0", "forward", other("all_gather", rounds=1)),
        "all_gather over context takes pieces as dealt in 1 round, and they are dealt in 2 rounds"),
    "a mean over more sequences than there are": (
        "1d", lambda plan: replace(plan, sequences=plan.sequences + 1), "the loss is a mean over 9"),
}  # fmt: skip


@pytest.fixture(scope="module")
def planned():
    return {name: make_plan(case()) for name, case in CASES.items()}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_shipped_experiments_are_sound(name):
    assert find_unsoundness(make_plan(compose_config([f"+experiment={name}"]))) == []


@pytest.mark.parametrize("case", CASES)
def test_small_plans_are_sound(planned, case):
    assert find_unsoundness(planned[case]) == []


@pytest.mark.parametrize("what", MUTANTS)
def test_mutants_are_seen(planned, what):
    case, change, line = MUTANTS[what]
    lines = find_unsoundness(change(planned[case]))
    assert any(line in text for text in lines), lines[:3]


@pytest.mark.parametrize("case", CASES)
def test_every_change_of_a_step_is_seen(planned, case):
    """Each step of each conversion, of the operations of one block and of those outside of blocks."""
    plan, passed, tried = planned[case], [], 0
    walk = PlanWalk(plan)
    for (kind, name), o in plan.operations.items():
        for part, c, put in conversions(o) if "layers.1" not in name else ():
            for mutant in every_step(c, 3, list(plan.mesh.axes)):
                tried += 1
                try:
                    walk.check_operation(put(mutant))
                    passed.append((kind, name, part, mutant))
                except Unsound:
                    pass
    assert passed == [] and (tried or case == "one")


@pytest.mark.parametrize(("seeds", "count"), [(0, 60), pytest.param(60, 3000, marks=pytest.mark.full)])
def test_random_plans_are_sound(seeds, count, tmp_path):
    plans.write_files(Path(tmp_path))
    unsound, checked = {}, 0
    with plans.opened():
        for seed in range(seeds, seeds + count):
            r = Random(seed)
            for plan in plans.planned(plans.draw(r, r.choice(plans.CLASSES[:-1]), tmp_path)):
                checked += 1
                if lines := find_unsoundness(plan):
                    unsound[seed] = lines[:2]
    assert unsound == {} and checked > count / 2


def test_every_recorded_operation_has_a_form():
    words = {name: word for name, word in vars(Ops).items() if isinstance(word, Op)}
    recorded = {name for name, word in words.items() if type(word).record_operation is not Op.record_operation}
    assert recorded - {"pointwise", "pointwise_each", "scale", "add_loss_ahead"} == set(FORMS)


def test_a_kind_without_a_form_is_not_passed(planned):
    plan = with_operations(
        planned["1d"], "shift", BIAS, lambda o: replace(o, operation=replace(o.operation, kind="new"))
    )
    assert any("has no form" in line for line in find_unsoundness(plan))


def test_by_command(capsys, monkeypatch):
    assert command.main(["+experiment=gpt_quick", "--check"]) == 0
    assert capsys.readouterr().out == "sound: 81 operations and 68 parameters on data 2 x t 2\n"
    make = command.make_plan
    monkeypatch.setattr(command, "make_plan", lambda *arguments: with_reductions(make(*arguments), UP, drop("data")))
    assert command.main(["+experiment=gpt_quick", "--check", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["unsound"] == [f"project {UP}: gradient of {UP} is partial over data, and never summed there"]
