"""Texts that the ranks of a context share, with a part of the keys each, against one process."""

from __future__ import annotations

from collections import Counter

import pytest

from platform.plan import generation_passes
from platform.plan.generation_passes import PassShape, cache_unit, generation_batch_unit, ranks_per_text
from platform.plan.layout import Layout
from platform.plan.operation_plan import collective_label, traffic_bytes
from platform.plan.operations.attention import KeyValueCache
from platform.plan.rule import Conversion, relayout_steps
from platform.predict.choose_schedule import build_generation_model
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import answer_bytes
from platform.runtime import panels
from platform.train import generator
from platform.train.replies import Choice
from tests.answers.cached import say, some_texts
from tests.answers.test_cached import OTHERS, TOKENS, examine
from tests.harness.oracle import MODELS, configure

SMALL = {"layers": 2, "length": 32, "vocab": 64, "microbatch": 4, "global_batch": 16}
NESTED = {"context": 4, "context_kind": "nested", "context_heads": 2}
PLANS = {
    "gather": {"context": 4, "context_kind": "gather"},
    "nested, grouped queries": {**NESTED, **MODELS["llama"]},
    "ring, windows, 1d_sp": {"context": 4, "context_kind": "ring", "tensor": "1d_sp", "axes": {"t": 2},
                             **MODELS["modern"]},
    "soft caps": {"context": 4, **OTHERS["soft caps"]},
    "sinks": {"context": 4, **OTHERS["sinusoidal"]},
    "relative, 1d": {"context": 4, "tensor": "1d", "axes": {"t": 2}, "positions": "relative", "buckets": 8,
                     "distance": 12},
    "stages, zero": {"context": 2, "pipeline": "1f1b", "stages": 2, "data": 2, "zero": 3},
}  # fmt: skip
MORE = {
    "five ranks": {"context": 5, "length": 40},
    "heads, 2d": {"context": 4, "context_kind": "heads", "tensor": "2d", "axes": {"r": 2, "c": 1}},
    "3d": {"context": 4, "tensor": "3d", "axes": {"x": 1, "y": 2, "z": 1}},
    "dsp": {"context": 4, "branch": "dsp", "branch_axes": {"g": 2}},
    "dsp_csub": {"context": 4, "branch": "dsp_csub", "branch_axes": {"g": 2}},
    "experts": {"context": 4, **MODELS["experts"]},
    "gpt_oss": {"context": 4, **MODELS["gpt_oss"]},
    "latent": {"context": 4, **MODELS["latent"]},
}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """Texts of a few tokens are long."""
    for module in (generation_passes, generator):
        monkeypatch.setattr(module, "PIECE", 4)
    monkeypatch.setattr(generator, "ROUND", 2)


def shared(**more):
    c = configure(**{**SMALL, **more, "layers": 2, "tied": False})
    assert ranks_per_text(make_plan(c), 3, 5) == c.parallel.context
    return c


@pytest.mark.parametrize("name", [*PLANS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_equals_one_process(name):
    """Tokens, logits before each of them, and scores of given texts."""
    examine(shared(**{**PLANS, **MORE}[name]))


def test_beams_go_on_from_parts_of_keys():
    c, how = shared(**NESTED), Choice(64, beams=3)
    one = configure(**{**SMALL, "tied": False})
    texts = some_texts(c)
    (want,) = say(one, texts, TOKENS, how)
    assert all([w.ids for w in said.written] == [w.ids for w in want.written] for said in say(c, texts, TOKENS, how))


def test_who_shares():
    plan = make_plan(configure(**{**SMALL, **NESTED, "data": 2}))
    assert (
        generation_batch_unit(plan.scheme, plan.mesh) == 8 and generation_batch_unit(plan.scheme, plan.mesh, True) == 2
    )
    assert ranks_per_text(plan, 7, 5) == 4  # else a rank would read texts that nobody asked for
    assert ranks_per_text(plan, 8, 5) == ranks_per_text(plan, 7, 4) == 1
    pair = make_plan(configure(**{**SMALL, **NESTED, "kind": "encoder_decoder"}))
    assert ranks_per_text(pair, 1, 5) == 1  # an encoder reads its source whole


def test_a_rank_keeps_a_part_of_a_text():
    """A text that one rank would hold alone, with a quarter of its keys and values on each of four."""
    c = configure(**{**SMALL, "length": 4096, "context": 4, "microbatch": 1, "global_batch": 4})
    plan, model = make_plan(c), build_generation_model(c)
    alone, parted = (answer_bytes(plan, model, PassShape(1, rows, 4096, shared=rows == 1), 0, "cpu") for rows in (4, 1))
    keys = 2 * c.model.layers * 4096 * c.model.d_model * 8
    assert keys < alone < 1.1 * keys and keys / 4 < parted < alone / 3.5
    assert cache_unit(plan.scheme, plan.mesh, True) == 4


def test_bytes_and_parts(monkeypatch):
    """Each pass moves what its plan says; keys and values are split equally, whatever the number of tokens."""
    c, passes, sizes = shared(**PLANS["nested, grouped queries"]), [], set()

    class Counting(generator.RankPass):
        def run_pass(self, rows, offset, cache: KeyValueCache):
            communicator = self._communicator
            before = communicator.moved.copy()
            out = super().run_pass(rows, offset, cache)
            passes.append((self._shape, self._planned, communicator.moved - before, communicator.mesh.world_size))
            sizes.update(k.shape[0] * 4 == cache.capacity for k, _ in cache.blocks.values())
            return out

    monkeypatch.setattr(generator, "RankPass", Counting)
    say(c, some_texts(c, 1), TOKENS, Choice(64))
    assert sizes == {True}
    by_shape: dict[PassShape, list] = {}
    for shape, planned, moved, _ in passes:
        by_shape.setdefault(shape, []).append((planned, moved))
    assert {shape.tokens for shape in by_shape} == {8, 1, 10}
    for shape, passed in by_shape.items():
        planned = passed[0][0]
        head, spec = planned.head, planned.logits
        lies = head.planner.layout(spec), Layout.build_canonical({"batch": head.planner.layout(spec)["batch"]})
        whole = head.planner.fill_shapes(Conversion(relayout_steps(spec.dims, *lies), ()), spec, *lies)
        launched = [
            *(x for o in (*planned.body.operations.values(), *head.operations.values()) for x in o.collectives),
            *head.planner.collectives_of_conversion(whole),
            *planned.body.planner.collectives_of_conversion(planned.joins),
        ]
        want: Counter[str] = Counter()
        for x in (x for x in launched if x.phase == "forward"):
            want[collective_label(x.op, head.mesh.order_axes(x.axes))] += traffic_bytes(x, head.mesh, head.itemsize)
        times = len(passed) // head.mesh.world_size
        assert sum((moved for _, moved in passed), Counter()) == {key: times * n for key, n in want.items()}, shape


def mean_of_parts(communicator, plan, blocks, hiding, over):
    """The mean of what ranks have, as if all had equally much."""
    out = panels._attend_all_panels(communicator, plan, blocks, hiding).result_so_far()
    return communicator.launch("all_reduce", out, over).wait() / communicator.mesh.count_ranks(over)


def from_the_first(communicator, plan, blocks, hiding, over):
    """Keys of every rank are taken for the first ones."""
    (stretch,) = plan.keys[0]
    return merged(communicator, plan._replace(keys=[[stretch._replace(first=0)]]), blocks, hiding, over)


merged = panels.attend_split_keys


@pytest.mark.parametrize("mutant", [mean_of_parts, from_the_first])
def test_negative_controls(mutant, monkeypatch):
    monkeypatch.setattr(panels, "attend_split_keys", mutant)
    with pytest.raises(AssertionError, match="logits before token"):
        examine(shared(**PLANS["gather"]))
