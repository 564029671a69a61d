"""Every schedule with every tensor scheme, data parallelism, recomputation: equal to one process in fp64."""

from __future__ import annotations

import random
import threading
import weakref
from math import prod

import pytest
from torch.autograd.graph import get_gradient_edge

from platform.plan.simulate import simulate
from platform.plan.step_collectives import communication
from platform.predict.choose_schedule import build_schedule
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.runtime.pipeline import PipelineExecutor
from platform.train.stage_passes import StagePasses
from tests.harness.oracle import MODELS, compare, configure, counted, prove, run, serial, trainer_of, validation_loss
from tests.harness.pairwise import cover, product
from tests.harness.suite import suite, title
from tests.harness.threads import ThreadGroups, run_threads

LAYOUT = {"batch": ["rows"], "heads": ["cols"], "d_ff": ["cols"], "vocab": ["cols"]}
SCHEMES = {
    "serial": ("serial", {}, None),
    "1d": ("1d", {"t": 2}, None),
    "1d_sp": ("1d_sp", {"t": 2}, None),
    "2d": ("2d", {"r": 2, "c": 2}, None),
    "2d 1x2": ("2d", {"r": 1, "c": 2}, None),
    "3d": ("3d", {"x": 1, "y": 2, "z": 2}, None),
    "3d 2,1,1": ("3d", {"x": 2, "y": 1, "z": 1}, None),
    "layout": ("layout", {"rows": 2, "cols": 1}, LAYOUT),
    "layout cols": ("layout", {"rows": 1, "cols": 2}, LAYOUT),
}
CORE = {
    "schedule": ["gpipe", "1f1b", "interleaved", "zb_h1"],
    "stages": [2, 3, 4],
    "chunks": [1, 2, 3],
    "microbatches": [4, 5],
    "scheme": list(SCHEMES),
    "branch": ["none", "dsp", "dsp_csub"],
    "data": [1, 2, 4],
    "zero": [0, 1, 2, 3],
    "zero_group": [0, 2],
}
MORE = {
    "model": ["gpt", "llama", "bert", "t5"],
    "dropout": [0.0, 0.2],
    "recompute": [("none", 1), ("selective", 1), ("full", 1), ("full", 2)],
    "scatter_gather": [True, False],
}


def build(case):
    tensor, axes, rules = SCHEMES[case["scheme"]]
    recompute, every = case["recompute"]
    units = case["stages"] * case["chunks"]
    layers = max(2, units // 2 - 1 if MODELS[case["model"]].get("kind") == "encoder_decoder" else units - 2)
    return configure(
        tensor,
        axes,
        rules=rules,
        branch=case["branch"],
        branch_axes={} if case["branch"] == "none" else {"g": 2},
        data=case["data"],
        zero=case["zero"],
        zero_group=case["zero_group"],
        microbatch=4,
        global_batch=4 * case["data"] * case["microbatches"],
        pipeline=case["schedule"],
        stages=case["stages"],
        chunks=case["chunks"],
        scatter_gather=case["scatter_gather"],
        recompute=recompute,
        every=every,
        dropout=case["dropout"],
        **{**MODELS[case["model"]], "layers": layers, "d_model": 16, "heads": 4, "d_ff": 32, "length": 8},
    )


def legal(case) -> bool:
    if case["schedule"] in ("gpipe", "1f1b") and case["chunks"] > 1:
        return False
    if case["zero"] and (case["data"] == 1 or case["branch"] == "dsp_csub"):
        return False
    if case["zero_group"] and not (case["zero"] and case["data"] == 4):
        return False  # there is one group
    return ranks(case) <= 8


def ranks(case) -> int:
    inner = prod(SCHEMES[case["scheme"]][1].values()) * (1 if case["branch"] == "none" else 2)
    return inner * case["data"] * case["stages"]


def drawn(core, draw: random.Random):
    return {**core, **{name: draw.choice(values) for name, values in MORE.items()}}


CASES = [drawn(case, random.Random(i)) for i, case in enumerate(product(CORE, legal))]
SEVERAL = [drawn(case, random.Random(f"{i} {k}")) for i, case in enumerate(CASES) for k in range(4)]
PLAIN = {"stages": [2], "chunks": [1, 2], "scheme": ["1d_sp", "3d 2,1,1"], "model": ["gpt", "t5"]}
COVER = cover(SEVERAL, plain=PLAIN, cost=lambda case: (ranks(case) * case["stages"] * case["chunks"]) ** 0.25)


@suite("oracle of pipelines (threads)", CASES, COVER)
def test_equals_one_process(case):
    """Every schedule, size and scheme, each with one draw of the rest."""
    prove(build(case))


@pytest.mark.full
@pytest.mark.parametrize("case", cover(SEVERAL), ids=title)
def test_pairwise_cover_of_every_value(case):
    prove(build(case))


def test_negative_control_forgotten_tied_gradient(monkeypatch):
    """Where the head's gradient of a tied embedding does not reach the first stage, the oracle must fail."""
    c = configure(pipeline="1f1b", stages=2, microbatch=2)
    monkeypatch.setattr("platform.train.trainer.sum_tied_gradients", lambda *_: None)
    plan, results = run(c)
    assert plan.stages_of_tied_parameters == {"embedding": (0, 1)}
    with pytest.raises(AssertionError, match="embedding"):
        compare(c, plan, results, serial(c))


@pytest.mark.parametrize("scheme", ["1d", "serial"])
def test_scatter_gather_divides_what_is_sent_by_t(scheme):
    """Narayanan et al. 2021, section 4.1: of a stream that t ranks replicate, each sends 1/t, forward and backward."""
    axes = {"t": 2} if scheme == "1d" else {}
    sent = {}
    for on in (False, True):
        c = configure(scheme, axes, pipeline="1f1b", stages=2, microbatch=2, scatter_gather=on, tied=False)
        plan, results = run(c)
        sent[on] = counted(results)["send/stage"]
        assert communication(plan)["send/stage"] == sent[on]
    assert sent[False] == (2 if scheme == "1d" else 1) * sent[True]


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)])
def test_live_activations_are_the_simulator_s(schedule, chunks):
    c = configure(pipeline=schedule, stages=2, chunks=chunks, microbatch=2, global_batch=12)
    plan, peaks = measured_live(c)
    assert peaks == list(simulate(build_schedule(c, 1)).peak_live)
    assert plan.num_stages == 2


def measured_live(c):
    plan = make_plan(c)

    def work(communicator):
        trainer = trainer_of(c, plan, communicator)
        trainer.compute_gradients(1)
        return trainer.peak_live

    return plan, run_threads(plan.mesh, work)


def test_an_output_is_freed_when_it_was_sent(monkeypatch):
    """Of what a stage has sent only the edge of the graph stays: neither the output nor what shares its memory."""
    c = configure(pipeline="gpipe", stages=2, microbatch=2, tied=False)
    plan = make_plan(c)
    references, alive = [], []  # on stage 0; how many of them there are when each of its backward passes begins
    input_gradient, send = PipelineExecutor._compute_input_gradients, ThreadGroups.send
    mine = lambda: threading.current_thread().name == "rank0"  # noqa: E731

    def edge(x):
        references.extend([weakref.ref(x)] if mine() else [])
        return get_gradient_edge(x)

    def sending(self, x, stage):
        references.extend([weakref.ref(x)] if mine() else [])
        return send(self, x, stage)

    def beginning(self, action, gradients):
        alive.extend([sum(reference() is not None for reference in references)] if mine() else [])
        return input_gradient(self, action, gradients)

    monkeypatch.setattr("platform.runtime.pipeline.get_gradient_edge", edge)
    monkeypatch.setattr("platform.runtime.pipeline.SENDS_IN_FLIGHT", 0)
    monkeypatch.setattr(ThreadGroups, "send", sending)
    monkeypatch.setattr(PipelineExecutor, "_compute_input_gradients", beginning)
    run_threads(plan.mesh, lambda communicator: trainer_of(c, plan, communicator).compute_gradients(1))
    assert plan.microbatches == len(alive) == 4 and len(references) == 8 and alive[0] == 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_evaluation_is_that_of_one_process(schedule):
    def work(c, plan):
        def run_(communicator):
            trainer = trainer_of(c, plan, communicator)
            return validation_loss(trainer)

        return run_threads(plan.mesh, run_) if plan.mesh.world_size > 1 else [run_(SingleRank(plan.mesh))]

    c = configure(microbatch=4, **MODELS["t5"])
    (loss,) = work(c, make_plan(c))
    chunks = 2 if schedule == "zb_h1" else 1
    piped = configure("1d", {"t": 2}, pipeline=schedule, stages=2, chunks=chunks, microbatch=4, **MODELS["t5"])
    for actual in work(piped, make_plan(piped)):
        assert abs(actual - loss) < 1e-10


@pytest.mark.parametrize(
    "more",
    [
        {"data": 3, "microbatch": 2, "dropout": 0.1},
        {"data": 2, "tensor": "1d", "axes": {"t": 2}, "zero": 1, **MODELS["t5"]},
        {"data": 3, "microbatch": 1, "pipeline": "1f1b", "stages": 2, **MODELS["bert"]},
        {"branch": "dsp_csub", "branch_axes": {"g": 2}, **MODELS["original"]},
    ],
    ids=str,
)
def test_a_partial_microbatch_weighs_what_it_has(more):
    """11 sequences: the last microbatch lacks some, on some replicas or on all."""
    c = configure(**{"global_batch": 11, **more})
    plan, results = run(c)
    assert plan.microbatches * plan.sizes["batch"] > plan.sequences == 11
    compare(c, plan, results, serial(c))
    assert counted(results) == communication(plan)


def test_negative_control_partial_microbatch(monkeypatch):
    """Where the missing sequences were real ones, the oracle must fail."""
    c = configure(data=3, microbatch=2, global_batch=11)
    load = StagePasses.load_input_blocks
    monkeypatch.setattr(
        StagePasses,
        "load_input_blocks",
        lambda self, split, first, end=None, chunk=None: load(self, split, first, chunk=chunk),
    )
    with pytest.raises(AssertionError):
        compare(c, *run(c), serial(c))
