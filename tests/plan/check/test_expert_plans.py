"""The static check sees whatever is changed in the plan of experts, one thing at a time, under every shipped scheme."""

from __future__ import annotations

from collections import Counter
from typing import Any

from platform.config.fields import Config
from platform.plan.operation_forms import Unsound
from platform.plan.plan import Plan
from platform.plan.plan_check import PlanWalk, find_unsoundness
from platform.predict.make_plan import make_plan
from tests.harness.oracle import configure
from tests.harness.pairwise import cover, product
from tests.harness.plan_mutants import conversions, every_reading, every_reduction, every_step
from tests.harness.suite import suite
from tests.runtime.oracle.test_experts import KINDS, SCHEMES

MESH_TF = {
    "mesh_tf_data": ("mesh_tf_data", {"all": 2}),
    "mesh_tf_model": ("mesh_tf_model", {"all": 2}),
    "mesh_tf_2d": ("mesh_tf_2d", {"rows": 2, "cols": 2}),
    "mesh_tf_3d": ("mesh_tf_3d", {"rows": 2, "cols": 2, "planes": 2}),
    "mesh_tf_empty": ("mesh_tf_empty", {"all": 2}),
}
WHERE = {**SCHEMES, **MESH_TF}
FACTORS = {
    "scheme": list(WHERE),
    "branch": ["none", "dsp", "dsp_slice", "dsp_csub"],
    "split": [(4, 2), (4, 4), (2, 1)],  # replicas, of which so many share the experts
    "kind": ["shared", "both ways"],
    "gathered": ["keep", "again"],
}


def configured(case: dict[str, Any]) -> Config:
    (tensor, axes), (data, experts) = WHERE[case["scheme"]], case["split"]
    zero = 1 if case["branch"] != "dsp_csub" and data > experts else 0
    more = {"branch_axes": {} if case["branch"] == "none" else {"g": 2}, "data": data, "experts_of": experts}
    sizes = {"microbatch": 8, "global_batch": 64, "layers": 1, "zero": zero, "gathered": case["gathered"]}
    return configure(tensor, axes, branch=case["branch"], **more, **sizes, **KINDS[case["kind"]])


def passing(plan: Plan) -> tuple[list[Any], Counter[str]]:
    """What of a plan is changed and not seen, and how much of each kind was changed."""
    walk, axes = PlanWalk(plan), [a for a, n in plan.mesh.axes.items() if n > 1]
    passed, tried = list[Any](), Counter[str]()
    for (kind, name), o in plan.operations.items():
        if ".mlp" in name or kind == "token_loss":
            mutants = [put(m) for _, c, put in conversions(o) for m in every_step(c, 4, axes)]
            for mutant in (*mutants, *every_reading(o, axes)):
                tried["operations"] += 1
                try:
                    walk.check_operation(mutant)
                    passed.append(mutant)
                except Unsound:
                    pass
    for p in plan.parameters:
        for changed in every_reduction(plan, p.name) if ".mlp" in p.name else ():
            tried["gradients"] += 1
            passed += [] if find_unsoundness(changed) else [(p.name, changed.reductions[p.name])]
    return passed, tried


FEW = product({**FACTORS, "gathered": ["keep"], "split": [(4, 2)]}, lambda case: True)
CASES = product(FACTORS, lambda case: True)


@suite("plans of experts, changed one thing at a time", CASES, cover(FEW)[::7])
def test_every_change_is_seen(case):
    plan = make_plan(configured(case))
    assert find_unsoundness(plan) == []
    passed, tried = passing(plan)
    assert passed == [] and tried["operations"] > 100 and tried["gradients"] > 10
