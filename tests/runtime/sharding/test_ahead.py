"""Split weights are gathered a matrix product ahead: equal to one process, and under the product before."""

from __future__ import annotations

import threading
from itertools import accumulate, pairwise

import pytest

from platform.plan.gather_order import find_fetches
from platform.predict.make_plan import make_plan
from platform.runtime import einsum, scaled_einsums
from tests.harness.oracle import MODELS, configure, examine, run, trainer_of
from tests.harness.pairwise import product
from tests.harness.suite import suite
from tests.harness.threads import ThreadGroups, run_threads

SCHEMES = {
    "2d_gather": ("2d_gather", {"r": 2, "c": 2}),
    "3d": ("3d", {"x": 2, "y": 1, "z": 2}),
    "fsdp": ("3d", {"x": 2, "y": 1, "z": 1}),
}
FACTORS = {
    "scheme": list(SCHEMES),
    "gathered": ["keep", "again"],
    "recompute": ["none", "full"],
    "pipeline": [("none", 1, 1), ("zb_h1", 2, 2)],
    "zero": [0, 3],
    "model": ["gpt", "t5"],
    "branch": ["none", "dsp_csub"],
}


def configured(case, overlap=True):
    tensor, axes = SCHEMES[case["scheme"]]
    kind, stages, chunks = case["pipeline"]
    branch = {"branch": case["branch"], "branch_axes": {} if case["branch"] == "none" else {"g": 2}}
    shape = {"data": 2 if case["zero"] else 1, "pipeline": kind, "stages": stages, "chunks": chunks}
    options = {name: case[name] for name in ("zero", "recompute", "gathered")}
    sizes = {"layers": 2, "d_model": 16, "heads": 4, "d_ff": 32, "length": 8}
    c = configure(tensor, axes, **branch, **shape, **options, **{**MODELS[case["model"]], **sizes})
    c.parallel.overlap = overlap
    return c


def legal(case) -> bool:
    c = configured(case)
    size = c.parallel.data * c.pipeline.stages * (1 if case["branch"] == "none" else 2)
    for n in c.tensor.axes.values():
        size *= n
    return size <= 8 and not (case["zero"] and case["branch"] == "dsp_csub")


@suite("oracle of weights gathered ahead (threads)", product(FACTORS, legal))
def test_equals_one_process(case):
    c = configured(case)
    plan, results = run(c)
    assert any(f.multiplies for chunk in plan.chunks for f in find_fetches(chunk))
    examine(c, plan, results)


CASE = {"scheme": "3d", "recompute": "none", "pipeline": ("none", 1, 1), "zero": 0, "model": "gpt", "branch": "none"}


def events_of_a_step(c, monkeypatch):
    """By rank, of a step: (True, name) of each collective that is launched, (False, "") of each matrix product."""
    plan, events = make_plan(c), {}
    launch, local_einsum = ThreadGroups.launch, einsum.local_einsum_function

    def note(*event):
        events.setdefault(threading.current_thread().name, []).append(event)

    def launched(self, *arguments, **options):
        note(True, options.get("name", ""))
        return launch(self, *arguments, **options)

    def multiplying(*dims):
        multiply = local_einsum(*dims)

        def run(*arguments, **options):
            note(False, "")
            return multiply(*arguments, **options)

        return run

    def work(communicator):
        trainer = trainer_of(c, plan, communicator)
        events[threading.current_thread().name] = []
        trainer.step(1)

    with monkeypatch.context() as patched:
        patched.setattr(ThreadGroups, "launch", launched)
        patched.setattr(scaled_einsums, "_find_plain_function", scaled_einsums._find_plain_function.__wrapped__)
        for module in (einsum, scaled_einsums):
            patched.setattr(module, "local_einsum_function", multiplying)
        run_threads(plan.mesh, work)
    return plan, list(events.values())


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
def test_the_next_weight_is_on_its_way_when_a_product_is_computed(back, overlap, monkeypatch):
    """And without parallel.overlap, the control, it leaves after it."""
    c = configured(CASE | {"gathered": "again"}, overlap)
    plan, ranks = events_of_a_step(c, monkeypatch)
    counts = {f.converted[0][0].name: len(f.converted) for f in find_fetches(plan.chunks[0]) if f.multiplies}
    del counts["embedding"]  # the loss multiplies by itself
    names = [*reversed(counts)] if back else [*counts]
    total, each = sum(counts.values()), 2 if back else 1  # a product forward; two backward
    for events in ranks:
        products = [*accumulate(event == (False, "") for event in events)]
        for place, (name, following) in enumerate(pairwise(names)):
            leaves = [i for i, event in enumerate(events) if event == (True, f"gather {following}")]
            assert len(leaves) == 2 * plan.microbatches, "once in each direction"
            for m, i in enumerate(leaves[back::2]):
                before = m * 3 * total + back * total + each * sum(counts[done] for done in names[:place])
                assert products[i] == before + (0 if overlap else each * counts[name])
