"""Seconds of a step against closed forms: products, collectives, schedules; and that nothing of a plan is left out."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from operator import attrgetter
from unittest.mock import ANY

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from platform.boundary.refusals import ConfigError
from platform.config.fields import KEYS, Config
from platform.config.groups import Cluster
from platform.launch import compose_config
from platform.model import build_model
from platform.plan.accelerators import ACCELERATORS
from platform.plan.layout import Mesh
from platform.plan.model_types import Spec
from platform.plan.operation_plan import Collective
from platform.plan.operations.recorder import Symbol
from platform.plan.schedule import Kind
from platform.plan.simulate import simulate
from platform.predict.choose_schedule import build_schedule
from platform.predict.hardware import HardwareMistake, parse_hardware
from platform.predict.make_plan import make_plan
from platform.predict.measured_runs import read_system
from platform.predict.price import (
    PassTime,
    add_message_waits,
    collective_seconds,
    price_work,
    product_seconds,
    tiling_share,
)
from platform.predict.step_price import (
    build_step_work,
    choose_pricing_hardware,
    find_gpu_hardware,
    names_of_hardware,
    read_hardware,
    step_price,
)
from platform.predict.systems import System
from platform.predict.work import FUSED_BACKWARD, Execution, MatrixProduct, record_chunk_work
from platform.runtime.communicator import SingleRank
from tests.harness.oracle import trainer_of

A100 = read_hardware("a100_80g")
SMALL = ["+experiment=gpt_quick", "model.layers=4", "parallel.data=1", "tensor=serial", "train.global_batch=32"]
SCHEMES = {
    "serial": ["tensor=serial"],
    "1d": ["tensor=1d", "tensor.axes.t=2"],
    "sequence": ["tensor=1d_sp", "tensor.axes.t=2"],
    "2d": ["tensor=2d", "tensor.axes.r=2", "tensor.axes.c=2"],
    "gathered": ["tensor=2d_gather", "tensor.axes.r=2", "tensor.axes.c=2"],
    "3d": ["tensor=3d", "tensor.axes.x=2", "tensor.axes.y=2", "tensor.axes.z=2"],
    "stages": ["pipeline=1f1b", "pipeline.stages=2"],
    "experts": ["model.experts=4", "model.experts_per_token=2", "parallel.data=2", "parallel.experts=2"],
    "whole experts": [
        "model.experts=4",
        "model.experts_per_token=2",
        "parallel.data=2",
        "parallel.experts=2",
        "model.capacity_factor=0",
        "tensor=1d_sp",
        "tensor.axes.t=2",
        "parallel.tensor_experts=whole",
    ],
}


class WithStretch:
    """A model, and behind its layers one more stretch that is recomputed, without any product."""

    def __init__(self, model):
        self.model, self.inputs = model, model.inputs

    def part(self, ops, inputs, flow, units):
        stream = Spec.of("stream", "length batch d_model")
        outputs = self.model.part(ops, inputs, flow, units)
        ops.recomputed("full", "more", lambda x: ops.pointwise("gelu", x), stream, Symbol(stream))
        return outputs


def planned(*overrides):
    config = compose_config([*SMALL, *overrides])
    return config, make_plan(config)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_products_of_all_ranks_are_those_of_the_model(scheme):
    """FLOPs by shape on a rank, times the ranks of a stage, are the FLOPs that the plan counts of the whole model; the
    backward pass has twice as many."""
    config, plan = planned(*SCHEMES[scheme])
    work = build_step_work(config, plan)
    counted = plan.flops_per_token * plan.sizes["batch"] * plan.sizes["length"] / 3
    ranks = plan.mesh.world_size // plan.num_stages

    def of(passes, fused):
        return sum(
            n * (sum(p.flops for p in part.products) + part.fused * fused) for w in passes for part, n in w.parts
        )

    # the kernel of attention skips half of the scores, and its backward pass has five products for two, slower ones
    forward, backward = of(work.forward, 2.0), of(work.backward, 2 * 2 / FUSED_BACKWARD)
    assert forward * ranks == pytest.approx(counted, rel=1e-6)
    assert backward * ranks == pytest.approx(2 * counted, rel=1e-6)


def test_lent_experts_cost_what_they_move():
    """A matrix of an expert on its way three times a pass, and no share of a routing."""
    experts = ["model.experts=8", "model.capacity_factor=0", "parallel.data=4", "parallel.experts=4"]
    h100 = read_hardware("h100")
    seconds = [
        price_work(build_step_work(*planned(*experts, f"parallel.lent_experts={n}")), h100).seconds_by_part[
            "waiting for expert"
        ]
        for n in (0, 1)
    ]
    assert seconds[0] < seconds[1] < 2 * seconds[0]


def test_recomputation_repeats_the_forward_pass():
    """All of it, as other systems do, or all but each block's last product, as ours does."""
    work = {
        kind: build_step_work(*planned(f"recompute={kind}"), system=System(repeats_all=True))
        for kind in ("none", "full")
    }

    def products(w, phase):
        return sum(n * p.flops for pass_ in getattr(w, phase) for part, n in pass_.parts for p in part.products)

    again = products(work["full"], "backward") - products(work["none"], "backward")
    logits = products(work["none"], "forward") - again  # all but the head
    assert 0 < logits < again
    config, plan = planned("recompute=full")
    early = products(build_step_work(config, plan), "backward") - products(work["none"], "backward")
    model = config.model
    tokens = plan.sizes["batch"] * model.length
    assert again - early == 2 * tokens * model.layers * model.d_model * (model.d_ff or 4 * model.d_model)


CHUNKED = {
    "gpt": [],
    "llama": ["model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false"],
    "again": ["recompute=full"],
    "two microbatches": ["train.microbatch=16"],
}


@pytest.mark.parametrize("case", CHUNKED)
def test_feed_forward_layers_in_chunks_cost_their_first_products_twice(case):
    """As a step itself multiplies: the difference to layers that are whole, counted by the operations of torch."""

    def count(chunks: int) -> tuple[int, float]:
        config = compose_config([*SMALL, "train.microbatch=32", f"train.mlp_chunks={chunks}", *CHUNKED[case]])
        plan = make_plan(config)
        trainer = trainer_of(config, plan, SingleRank(plan.mesh))
        in_place = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            trainer.step(1)
        work = build_step_work(config, plan)
        flops = (
            n * sum(p.flops for p in part.products) for w in (*work.forward, *work.backward) for part, n in w.parts
        )
        return counter.get_total_flops(), sum(flops) * plan.microbatches

    (whole, planned_whole), (chunked, planned_chunks) = count(1), count(4)
    assert chunked - whole == pytest.approx(planned_chunks - planned_whole) and chunked > whole


def test_chunks_serve_nothing_where_ranks_exchange_in_the_middle():
    """Such a layer is computed whole, and the plan's price says so."""
    gathered, split = (["tensor=2d_gather", "tensor.axes.r=2", "tensor.axes.c=2"], ["tensor=1d", "tensor.axes.t=2"])
    for typed, is_dearer in ((gathered, False), (split, True)):
        whole, chunked = (
            price_work(build_step_work(*planned(*typed, f"train.mlp_chunks={n}")), A100).seconds for n in (1, 4)
        )
        assert (chunked > whole) is is_dearer


def test_a_system_that_gathers_weight_by_weight():
    """It waits for what the plan would hide, and in recomputation for all of a layer's four weights but the last once
    more; a kernel copies what each of two ranks sent; gradients are summed whole."""
    config, plan = planned("recompute=full", "parallel.data=2", "parallel.zero=3")
    hidden, waited = (
        build_step_work(config, plan, system=System(by_weight=chosen, counts_calls=False)) for chosen in (False, True)
    )
    forward, backward = waited.forward[0], waited.backward[0]
    layers, others = config.model.layers, 4  # embedding, at both ends; positions; last norm

    def moved(launches):
        return sum(c.elements * n for c, n in launches.items())

    assert moved(forward.fetches) == moved(hidden.forward[0].hides) and not forward.hides
    assert sum(forward.fetches.values()) == 4 * layers + others
    assert sum(backward.fetches.values()) == 7 * layers + others - 2  # the end's are there still
    assert {c.op for c in backward.hides} == {"all_reduce"}
    more = price_work(waited, replace(A100, launch=2 * A100.launch)).seconds - price_work(waited, A100).seconds
    gathers = sum(forward.fetches.values()) + sum(backward.fetches.values())
    assert more == pytest.approx(plan.microbatches * gathers * 2 * A100.launch)


def test_a_stretch_without_products_loses_none_of_another_stretch():
    """A system that leaves out a stretch's last product leaves out nothing where the stretch has none."""
    config, plan = planned("recompute=full", "pipeline=1f1b", "pipeline.stages=2")
    model = build_model(config.model)
    usual, more = (record_chunk_work(plan, m, Execution(fused_dropout=True))[0] for m in (model, WithStretch(model)))
    left = [{part: n for part, n in work.backward.items() if part.products and n} for work in (usual, more)]
    assert left[0] == left[1] and more.backward != usual.backward


@pytest.mark.parametrize("kind,chunks,batch", [("1f1b", 1, 32), ("interleaved", 2, 32), ("gpipe", 1, 64)])
def test_known_makespans_are_simulated_ones(kind, chunks, batch):
    """The closed form of a schedule equals its simulation, with a last stage that is slower (logits)."""
    config, plan = planned(
        f"pipeline={kind}", "pipeline.stages=2", f"pipeline.chunks={chunks}", "train.microbatch=2",
        f"train.global_batch={batch}", "model.vocab=16384",
    )  # fmt: skip
    work = build_step_work(config, plan)
    table = build_schedule(config, plan.num_replicas)
    simulated = replace(work, execution=replace(work.execution, schedule="file", table=table))
    assert price_work(work, A100).seconds == pytest.approx(price_work(simulated, A100).seconds, rel=2e-3)


@pytest.mark.parametrize("stages", [2, 4])
def test_messages_of_1f1b_wait_as_long_as_in_a_simulation_of_them(stages):
    """Passes between which messages are under way, which keep no stage busy."""
    config, plan = planned("pipeline=1f1b", f"pipeline.stages={stages}", "train.microbatch=2")
    forward_seconds, backward_seconds, message, n = 3.0, 5.0, 1.0, plan.microbatches
    forward = [PassTime(forward_seconds, {"stage": message} if stage else {}) for stage in range(stages)]
    backward = [PassTime(backward_seconds, {"stage": message} if stage < stages - 1 else {}) for stage in range(stages)]
    seconds = [sum(pair, PassTime()).seconds for pair in zip(*add_message_waits(forward, backward), strict=True)]
    times = {Kind.FORWARD: forward_seconds, Kind.BACKWARD: backward_seconds}
    simulated = simulate(build_schedule(config, plan.num_replicas), times, message).makespan
    assert n * seconds[0] + sum(seconds[1:]) == pytest.approx(simulated, rel=0.01)
    held_up = (n + stages - 1) * (forward_seconds + backward_seconds + 2 * message)
    assert held_up > 1.05 * simulated, "control: as if each message held up a stage"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_add_up(scheme):
    config, plan = planned(*SCHEMES[scheme])
    price = step_price(config, plan, A100)
    parts = price.computing + sum(price.waiting.values()) + price.bubble + price.host + price.optimizer
    assert parts == pytest.approx(price.seconds)
    assert price.training_days(price.tokens) == price.seconds / 86400


def test_a_large_product_takes_what_the_device_reaches():
    p = MatrixProduct(8192, 108 * 256, 1 << 20)
    assert product_seconds(p, A100, "bf16", 2) == pytest.approx(p.flops / (312e12 * A100.reached.products), rel=1e-3)
    assert tiling_share(256, 128, 1, 108) == pytest.approx(0.7 * 8 / 108)  # eight tiles of 64 x 64, at 0.7 of the best
    row = MatrixProduct(1, 8192, 8192)  # a vector times a matrix reads the matrix
    assert product_seconds(row, A100, "bf16", 2) == pytest.approx(8192 * 8194 * 2 / (2.039e12 * A100.reached.memory))


def test_ranks_of_a_node_share_its_links():
    mesh, size = Mesh.arrange_axes({"data": 4, "t": 8}), 1 << 30

    def seconds(*axes, op="all_reduce"):
        return collective_seconds(Collective(op, axes, size // 4, "metrics4", "reduce"), mesh, A100, {"metrics4": 4})

    node, network = 300e9 * A100.reached.node, 25e9 * A100.reached.network
    assert seconds("t") == pytest.approx(2 * 7 / 8 * size / node, rel=0.05)
    assert seconds("data") == pytest.approx(2 * 3 / 4 * size / network, rel=0.05)  # eight groups, eight adapters
    assert seconds("data", "t") == pytest.approx(2 * 31 / 32 * size / min(8 * network, node), rel=0.05)
    assert seconds("data", op="all_gather") == pytest.approx(3 * size / network, rel=0.05)


def test_a_ring_passes_every_rank_of_a_node():
    """A gather of few bytes around 64 nodes: 448 steps inside of nodes, and 63 between them."""
    mesh = Mesh.arrange_axes({"data": 512})
    one = Collective("all_gather", ("data",), 1 << 20, "metrics4", "reduce")
    slow = collective_seconds(
        one,
        mesh,
        replace(A100, node=replace(A100.node, hop=1.0), network=replace(A100.network, hop=3.0)),
        {"metrics4": 4},
    )
    tree = 2 * (3 + 6 * 3)
    assert slow == pytest.approx(min(448 + 63 * 3, tree), rel=0.05)


def test_every_hardware_is_read():
    for name in names_of_hardware():
        hardware = read_hardware(name)
        assert hardware.peak_flops("bf16") and hardware.memory >= 4e9
    assert find_gpu_hardware("A100-80GB") == A100


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=attrgetter("name"))
def test_every_known_accelerator_is_priced_as_itself(accelerator):
    gpu = accelerator.name.replace(" ", "-")
    named = find_gpu_hardware(gpu)
    assert named and (named.memory, named.peaks["bf16"]) == (accelerator.memory, accelerator.peak or ANY), gpu
    for precision in KEYS["precision"].choices:
        assert choose_pricing_hardware(Config(cluster=Cluster(gpu=gpu), precision=precision)) == named
    others = [other for other in ACCELERATORS if other != accelerator]
    assert named.name not in {find_gpu_hardware(other.name).name for other in others}
    assert 0 < named.network.bandwidth <= named.node.bandwidth <= named.bandwidth < named.peaks["fp32"]
    assert named.peaks["fp64"] <= named.peaks["fp32"] <= named.peaks["bf16"] <= named.peaks.get("fp8", inf)


def test_a_description_says_only_what_differs_from_another(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("like: h100\naccelerator: H200\nnode: {ranks: 4}\nreached: {memory: 0.4}\n")
    merged, h100 = read_hardware(str(own)), read_hardware("h100")
    assert (merged.ranks, merged.memory, merged.reached) == (4, 141e9, replace(h100.reached, memory=0.4))
    assert (merged.node, merged.peaks, merged.launch) == (h100.node, h100.peaks, h100.launch)
    own.write_text("like: " + str(own))  # no circle
    read_hardware.cache_clear()
    with pytest.raises(ConfigError, match="is like itself"):
        read_hardware(str(own))
    own.write_text("like: [h100]")
    read_hardware.cache_clear()
    with pytest.raises(ConfigError, match="there is no such file"):
        read_hardware(str(own))


def test_every_mistake_of_a_description_is_named():
    data = {"accelerator": "", "peaks": {"fp32": -1}, "node": {"ranks": 8, "speed": 3}, "reached": {"products": 2}}
    with pytest.raises(HardwareMistake) as error:
        parse_hardware("mine", data)
    assert len(error.value.mistakes) == len(set(error.value.mistakes))
    mistakes = "\n".join(error.value.mistakes)
    for expected in ("peaks.fp32=-1", "peaks.bf16", "node.speed: unknown", "network", "reached.products=2", "launch"):
        assert expected in mistakes
    with pytest.raises(ConfigError, match="legal: "):
        read_hardware("a300")


WAYS = {
    "fused": ([], []),
    "sinks": (["model.attention_sinks=true"], []),
    "recomputed": ([], ["recompute=selective"]),
    "ring": ([], ["parallel.context=2", "parallel.context_kind=ring"]),
    "some layers": ([], ["model.window_layers=[0,2]"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_window_counts_no_more_flops_than_it_sees(way):
    """By each kernel of attention: of a length of 512, 64 keys a query, and the rest of the model as without."""
    both, windowed = WAYS[way]
    whole, seen = (
        planned("model.length=512", "model.kv_heads=2", *both, *more)[1]
        for more in ([], ["model.window=64", *windowed])
    )
    layers = 2 if way == "some layers" else 4
    c = compose_config(SMALL).model
    assert whole.flops_per_token - seen.flops_per_token == pytest.approx(layers * 12 * c.d_model * (512 - 64))
    assert planned("model.length=512", "model.kv_heads=2", "model.window=512")[1].flops_per_token == pytest.approx(
        planned("model.length=512", "model.kv_heads=2")[1].flops_per_token
    )


def test_no_window_uses_more_than_all_of_a_gpu():
    typed = "model=gpt_oss_20b model.length=131072 precision=bf16 train.microbatch=1 train.global_batch=1".split()
    config = compose_config([*typed, "tensor=serial", "parallel.data=1", "recompute=full", "model.window_layers=[]"])
    assert 0.05 < step_price(config, make_plan(config), read_hardware("h100")).mfu < 0.6


@pytest.mark.parametrize("kind", ["gather", "ring", "heads"])
def test_contexts_share_the_work_of_attention(kind):
    """Whether keys are gathered, go around or are exchanged for heads: every query sees all of them."""
    typed = "model.length=512", "train.microbatch=2", "train.global_batch=2"
    contexts = "parallel.data=1", "parallel.context=2", f"parallel.context_kind={kind}"
    whole, shared = (
        sum(n * part.fused for p in build_step_work(*planned(*typed, *more)).forward for part, n in p.parts)
        for more in (("parallel.data=1",), contexts)
    )
    assert shared == pytest.approx(whole / 2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_is_hidden_is_all_that_is_not_waited_for(zero):
    """Hidden and waited for together are the waits of the same plan that hides nothing."""
    size = "model.d_model=1024", "model.length=512", "train.microbatch=1", "train.global_batch=32"
    typed = [*size, "parallel.data=16", f"parallel.zero={zero}", "parallel.bucket_mib=8", "precision=bf16"]
    (config, plan), (apart, same) = (planned(*typed, f"parallel.overlap={flag}") for flag in ("true", "false"))
    beside, waited = step_price(config, plan, A100), step_price(apart, same, A100)
    assert beside.hidden > 0 == waited.hidden
    assert beside.hidden + sum(beside.waiting.values()) == pytest.approx(sum(waited.waiting.values()))


# MB that kernels of a layer read and write but for products and attention, forward and backward, where a block is
# compiled as one function for sm_90 ahead of time: model, sequences -> both
COMPILED_MB = {("gpt2_124m", 8): (214, 512), ("llama_8b", 1): (1728, 2156)}


@pytest.mark.parametrize("of", COMPILED_MB)
def test_bytes_of_a_layer_are_those_of_its_compiled_kernels(of):
    model, each = of
    gpu = ["cluster.device=cuda", "cluster.gpu=H200"]

    def moved(layers: int) -> list[float]:
        c = compose_config(["+experiment=one_gpu", f"model={model}", f"model.layers={layers}", *gpu,
                            f"train.microbatch={each}", f"train.global_batch={each}"])  # fmt: skip
        work = build_step_work(c, make_plan(c))
        return [sum(n * part.bytes for part, n in w.parts if not part.fused) for [w] in (work.forward, work.backward)]

    megabytes = sum(more - few for more, few in zip(moved(3), moved(2), strict=True)) / 1e6
    assert megabytes == pytest.approx(sum(COMPILED_MB[of]), rel=0.1)


PATHS = {
    "blocks": ([], 35, 35),
    "blocks, recomputed": (["recompute=full"], 35, 70),
    "blocks with dropout": (["model.dropout=0.1"], 35, 35),
    "blocks with adapters": (["tune=lora"], 35, 35),
    "blocks in chunks": (["train.mlp_chunks=2"], 35, 35),
    "functions": (["model.experts=4", "model.capacity_factor=0"], None, None),
    "weight gradients apart": (["pipeline=zb_h1", "pipeline.stages=2", "train.global_batch=64"], 35, 70),
    "eager": (["train.compile=off"], None, None),
}


@pytest.mark.parametrize("path", PATHS)
def test_the_host_calls_python_as_its_path_does(path):
    """A layer more of a block that is one function costs a constant, any other one something for each kernel."""
    more, *each = PATHS[path]

    def counted(layers: int, what: str) -> list[int]:
        c = compose_config(["+experiment=one_gpu", f"model.layers={layers}", "cluster.device=cuda", *more])
        work = build_step_work(c, make_plan(c))
        if what == "calls":
            return [sum(w.calls for w in way) for way in (work.forward, work.backward)]
        return [sum(n * part.kernels for w in way for part, n in w.parts) for way in (work.forward, work.backward)]

    calls, kernels = ([b - a for a, b in zip(counted(2, w), counted(4, w), strict=True)] for w in ("calls", "kernels"))
    expected = [2 * n for n in each] if each[0] else [27 * n for n in kernels]
    assert calls == expected


def test_only_our_host_counts_its_calls():
    """Constants of others' rows have them, and a CPU's launches are measured with theirs."""
    c = compose_config([*SMALL, "model.d_model=16", "model.heads=2", "cluster.device=cuda"])
    plan, quick = make_plan(c), read_hardware("h200")
    ours, others = (build_step_work(c, plan, system=System(counts_calls=counts)) for counts in (True, False))
    assert price_work(ours, quick).host > 2 * price_work(others, quick).host
    assert price_work(ours, read_hardware("cpu")) == price_work(others, read_hardware("cpu"))
    names = ("usual", "fsdp", "megatron-2021", "deepspeed-2021")
    assert read_system("ours") == System() and not any(read_system(name).counts_calls for name in names)
