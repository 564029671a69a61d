"""What a model declares: its parameters, their dims, roles and initial values; the sizes that conf/model prints."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from itertools import product
from math import prod

import pytest
import yaml

from platform.config.fields import Model
from platform.model import build_model
from platform.model.layers import STD, slots_per_expert
from platform.model.transformer import embedding_table
from platform.plan.layout import DIMS
from platform.plan.operations.recorder import Recorder
from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from tests.conftest import ROOT
from tests.harness.oracle import MODELS, configure

FILES = sorted((ROOT / "conf" / "model").glob("*.yaml"))
FILES.remove(ROOT / "conf" / "model" / "from_hf.yaml")  # which stands for the model of a folder


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_models_comment_prints_its_size(path):
    """As many digits as are printed, of the parameters of a plan on one worker."""
    text = path.read_text()
    printed, unit, without = re.search(r"([\d.]+)([MB]) parameters( without the embedding)?", text).groups()
    c = configure()
    c.model = Model(**yaml.safe_load(text))
    plan = make_plan(c)
    assert communication(plan) == {} and plan.warnings == ()
    count = plan.parameter_count - (c.model.vocab * c.model.d_model if without else 0)
    digits = len(printed.partition(".")[2])
    assert abs(count / {"M": 1e6, "B": 1e9}[unit] - float(printed)) <= 0.501 * 10**-digits


@pytest.mark.parametrize("model", MODELS)
def test_every_declared_parameter_is_used(model):
    c = configure(**MODELS[model])
    built = build_model(c.model)
    recorder = Recorder(make_plan(c).scheme)
    built.forward(recorder, {name: name for name in built.inputs})
    used = {p.name for o in recorder.operations for p in o.parameters}
    declared = [p.name for p in built.parameters()]
    assert len(set(declared)) == len(declared) and set(declared) == used
    assert all(
        set(p.dims) <= {*DIMS, "buckets", "positions", "segments"} & set(built.sizes) for p in built.parameters()
    )


@pytest.mark.parametrize("model", MODELS)
def test_roles_decay_and_initial_values(model):
    """Vectors do not decay; what writes to the stream starts smaller by sqrt(2 layers); what a product adds comes
    first in memory."""
    c = configure(**{**MODELS[model], "layers": 8}).model
    for p in build_model(c).parameters():
        matrix, added = p.init == "normal", "relative" in p.name or p.name.endswith("sink")  # to scores, or beside them
        assert p.decay == (matrix and not added), p
        if p.name == "embedding":
            assert p.std == embedding_table(c).std
        elif matrix:
            assert p.std == (STD / 4 if p.role == "out" else STD), p
        else:
            assert p.init == ("ones" if p.name.endswith("gain") else "zeros"), p
        if p.role == "vector":
            assert p.dims[-1] == "d_model" or p.name.endswith("router_bias")
        elif matrix and not {"vocab", "positions", "segments"} & {*p.dims} and not added:
            dims = [d for d in p.dims if d != "experts"]
            read = ("d_model", "q_latent", "kv_latent")
            assert dims[0] == "d_model" if p.role == "out" else dims[-1] in read, p
            assert p.turned == (p.role == "in" and p.name != "head_transform"), p


def names(**model) -> set[str]:
    return {p.name for p in build_model(Model(layers=1, **model)).parameters()}


def test_options_add_and_remove_parameters():
    gpt = names()
    assert names(tied=False) - gpt == {"head"}
    assert gpt - names(positions="rope") == {"position"}
    assert gpt - names(norm="rmsnorm") == {f"{n}norm.bias" for n in ("", "layers.0.attention.", "layers.0.mlp.")}
    assert names(activation="swiglu") - gpt == {"layers.0.mlp.gate", "layers.0.mlp.gate_bias"}
    assert {n.rsplit("_", 1)[-1] for n in gpt - names(bias=False)} == {"bias"}


def test_sizes_that_are_not_given():
    sizes = build_model(Model(d_model=96, heads=6, kv_heads=0, d_ff=0, d_kv=0)).sizes
    assert (sizes["d_kv"], sizes["kv_heads"], sizes["d_ff"]) == (16, 6, 384)
    model = build_model(Model(d_model=96, heads=6, kv_heads=2, d_ff=100, d_kv=32))
    assert (model.sizes["d_kv"], model.sizes["kv_heads"], model.sizes["d_ff"]) == (32, 2, 100)
    query = next(p for p in model.parameters() if p.name.endswith("query"))
    assert prod(model.sizes[d] for d in query.dims) == 96 * 6 * 32


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.7, 2.0, 2.2])
def test_slots_are_counted_exactly(factor):
    """In binary, 1.1 x 50 is a little more than 55, and would give 56."""
    for length, (chosen, experts) in product((16, 50, 96, 200, 1000, 4096), ((1, 4), (2, 8), (4, 20), (8, 128))):
        c = Model(experts=experts, experts_per_token=chosen, capacity_factor=factor)
        wanted = Decimal(str(factor)) * length * chosen / experts
        assert slots_per_expert(c, length) == min(length, int(wanted.to_integral_value(ROUND_CEILING)))
    assert slots_per_expert(Model(experts=4, experts_per_token=1, capacity_factor=1.1), 200) == 55
