"""How systems run a plan: what each hides, sends and splits, as fields of `conf/system/`, one cause at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from platform.boundary.refusals import ConfigError
from platform.launch import compose_config
from platform.plan.plan_summary import STAGE
from platform.predict.measured_runs import MeasuredRun, compare_runs, read_measured_runs, read_system
from platform.predict.price import StepPrice, beside_passes_seconds, price_work
from platform.predict.systems import System
from platform.predict.work import PassWork

HEAD = "name,hardware,gpus,layers,d_model,heads,length,vocab,microbatch,global_batch,tensor,axes,seconds"
DENSE = "h100,{gpus},8,4096,32,2048,32000,1,{batch},{tensor},1"


@pytest.fixture
def run(tmp_path):
    """Make the measured run of a row of a table, with other columns beside the usual ones."""

    def read(gpus: int, batch: int, tensor: str, **more: str) -> MeasuredRun:
        path = tmp_path / "table.csv"
        row = DENSE.format(gpus=gpus, batch=batch, tensor=tensor)
        columns, cells = "".join(f",{name}" for name in more), "".join(f",{text}" for text in more.values())
        path.write_text(f"{HEAD}{columns}\nrow,{row}{cells}\n")
        return read_measured_runs(str(path), compose_config)[0]

    return read


def under(run: MeasuredRun, **fields: object) -> StepPrice:
    """The price of a run under a system that differs from ours in some fields."""
    system = replace(System(), **fields)
    work = replace(run.work, execution=replace(run.work.execution, system=system))
    return price_work(work, run.hardware)


def seconds_beside(total: float, buckets: int, chunks: int, stages: int, each: float) -> float:
    """How much of the sums of a stage's gradients is done when its passes end, one small piece after the other: the
    chunks' last passes end `stages` passes apart, and sums of a chunk may begin with its last pass."""
    pieces, now = 1000, 0.0
    for chunk in range(chunks):  # the deepest first
        begins = chunk * stages * each
        for piece in range(pieces):
            ready = begins + each * piece / pieces
            now = max(now, ready) + total / chunks / pieces
    exposed = max(0.0, now - ((chunks - 1) * stages + 1) * each)
    return total - max(exposed, total / buckets)


def test_sums_of_gradients_go_beside_the_passes_of_all_chunks():
    """The closed form against a queue; with one chunk, as before: the last pass hides all but the last bucket."""
    rng = Random(7)
    for _ in range(200):
        chunks, stages, each, total = rng.randint(1, 8), rng.randint(1, 9), rng.uniform(0.1, 2), rng.uniform(0.1, 40)
        buckets = chunks * rng.randint(1, 20)
        formula = float(beside_passes_seconds(total, buckets, chunks, stages, each))
        assert formula == pytest.approx(seconds_beside(total, buckets, chunks, stages, each), abs=0.004 * total)
    assert float(beside_passes_seconds(3.0, 4, 1, 8, 1.0)) == 1.0 and float(beside_passes_seconds(3.0, 4, 5, 8, 0)) == 0


def test_gathers_of_parameters_go_beside_the_next_forward_passes(run):
    """With overlap they leave little of a step; without, all of them are waited for."""
    steps = [run(16, 64, "serial,", zero="1", overlap=flag).predict_price({}) for flag in ("true", "false")]
    assert sum(steps[0].waiting.values()) < 0.25 * sum(steps[1].waiting.values())
    assert steps[0].hidden > 0 == steps[1].hidden
    for step in steps:
        assert sum(step.seconds_by_part.values()) == pytest.approx(step.seconds)


def test_messages_ahead_are_waited_for_once_a_step(run):
    """An interleaved step of twice the microbatches waits as long for them; only systems that send ahead do so."""
    one, two = (run(8, batch, "serial,", stages="4", chunks="2") for batch in (16, 32))
    assert under(one, sends_ahead=True).waiting[STAGE] == pytest.approx(under(two, sends_ahead=True).waiting[STAGE])
    assert under(two, sends_ahead=True).seconds < under(two).seconds
    alone = run(8, 32, "serial,", stages="4")
    assert under(alone, sends_ahead=True) == under(alone), "1F1B has no passes to put them beside"


def test_tensor_collectives_beside_products(run):
    tensor = run(8, 16, "1d,t=4", zero="1")
    half, whole = under(tensor, tensor_exposed=0.5), under(tensor)
    assert half.waiting["t"] == pytest.approx(whole.waiting["t"] / 2)
    assert half.waiting.keys() == whole.waiting.keys()
    assert half.seconds == pytest.approx(whole.seconds - half.waiting["t"], rel=0.02)


EXPERTS = {"model_experts": "8", "experts_per_token": "2", "experts": "8"}


def test_tokens_go_to_experts_once_to_each_node_and_rank(run):
    """A node gets a token once, where several of its experts do, and so does a rank of it."""
    split = run(32, 32, "1d_sp,t=4", **EXPERTS)
    by_node, whole = under(split, rows_by_node=True), under(split, rows_by_pair=True)
    nodes, copies = 4, 2
    share = nodes * (1 - (1 - 1 / nodes) ** copies) / copies
    assert share < by_node.waiting["expert"] / whole.waiting["expert"] < (1 + share) / 2
    alone = run(8, 16, "serial,", **EXPERTS)  # one node, no tensor ranks
    once, each = (under(alone, **{how: True}).waiting["expert"] for how in ("rows_by_node", "rows_by_pair"))
    assert 8 * (1 - (1 - 1 / 8) ** copies) / copies < once / each < 1, "but for the latency"
    drawn = Random(5)
    places = [{drawn.randrange(8) for _ in range(copies)} for _ in range(9000)]
    assert sum(map(len, places)) / 9000 / copies == pytest.approx(8 * (1 - (1 - 1 / 8) ** copies) / copies, rel=0.01)


def test_a_device_waits_for_the_host_to_read_counts_of_tokens(run):
    """Once a layer of experts and pass of a microbatch, twice where layers are computed again; else never."""
    for recompute, passes in (("none", 1), ("full", 2)):
        experts = run(8, 16, "serial,", recompute=recompute, **EXPERTS)
        waits = 8 * 2 * passes * 0.001  # layers, microbatches
        assert under(experts, read_wait=0.001).seconds - under(experts).seconds == pytest.approx(waits)
        assert under(experts, read_wait=0.001).host - under(experts).host == pytest.approx(waits)
    dense = run(8, 16, "serial,")
    assert under(dense, read_wait=0.001) == under(dense)


def test_tokens_may_go_to_experts_beside_another_microbatch(run):
    """What computing hides then slows it; of exchanges alone."""
    experts = run(8, 16, "1d_sp,t=2", experts="4", model_experts="8", experts_per_token="2")
    beside, before = under(experts, overlaps_experts=True), under(experts)
    moved = before.waiting["expert"] - beside.waiting["expert"]  # but for sums of gradients, which stay
    assert beside.hidden - before.hidden == pytest.approx(moved) and moved > 0.5 * before.waiting["expert"]
    assert beside.waiting["t"] == pytest.approx(before.waiting["t"])
    assert before.seconds - beside.seconds == pytest.approx(moved * (1 - experts.hardware.interference))
    dense = run(8, 16, "1d_sp,t=2")
    assert under(dense, overlaps_experts=True) == under(dense)


def test_attention_with_sinks_may_be_slow(run):
    """By as many accesses of its queries as the system says; no other attention is."""
    steps = [
        [run(1, 4, "serial,", **{"system": system, "model.attention_sinks": sinks}) for sinks in ("true", "false")]
        for system in ("megatron-bridge-2025", "megatron-bridge")
    ]
    (slow, plain), (quick, other) = [[row.predict_price({}).seconds for row in rows] for rows in steps]
    row = steps[0][0]
    sizes = 8 * 4 * 2048 * 4096 * row.work.plan.itemsize["compute"]  # layers, microbatches, tokens, width, bytes
    accesses = row.work.execution.system.sink_accesses * sizes
    reached = row.hardware.bandwidth * row.work.execution.system.constants["h100"]["memory"]
    assert slow - quick == pytest.approx(accesses / reached, rel=0.01) and plain == other


def test_a_system_has_constants_of_its_own(run):
    """Fitted ones come before them."""
    slow = {"h100": {"attention": 0.1}, "a100_80g": {"attention": 0.9}}
    row = run(1, 4, "serial,")
    own = replace(row, work=replace(row.work, execution=replace(row.work.execution, system=System(constants=slow))))
    assert own.predict_price({}).seconds == row.predict_price({"attention": 0.1}).seconds
    assert own.predict_price({"attention": 0.3}).seconds == row.predict_price({"attention": 0.3}).seconds


def test_constants_are_fitted_by_release_or_else_by_system(run):
    rows = [run(1, 4, "serial,", system=s, release=r) for s, r in (("usual", ""), ("fsdp", ""), ("fsdp", "2.1"))]
    assert [row.group for row in rows] == ["h100 usual", "h100 fsdp", "h100 2.1"]
    slower = [replace(row, seconds=row.predict_price({}).seconds * n) for row, n in zip(rows, (1, 2, 4), strict=True)]
    first, second, third = (c["products"] for c in compare_runs(slower, [True] * 3).constants.values())
    assert first > 1.5 * second > 2 * third


def test_layers_of_each_stage_are_a_column(run):
    """One number for all stages, or one for each chunk; the plan that ran has them, whatever is more even."""
    even = run(2, 8, "serial,", stages="2", layers_per_stage="4")
    ours = run(2, 8, "serial,", stages="2")
    uneven = run(2, 8, "serial,", stages="2", layers_per_stage="6 2")
    chunks = run(2, 8, "serial,", stages="2", chunks="2", layers_per_stage="4")

    def layers(row: MeasuredRun) -> list[int]:
        return [sum("layer" in unit or "block" in unit for unit in chunk.units) for chunk in row.work.plan.chunks]

    assert layers(even) == [4, 4] and layers(uneven) == [6, 2] and layers(chunks) == [2, 2, 2, 2]
    assert sum(layers(ours)) == 8 and uneven.predict_price({}).seconds > even.predict_price({}).seconds
    with pytest.raises(ConfigError, match=r"column layers_per_stage=5: must add up to 8 layers in 2 chunks; .*4"):
        run(2, 8, "serial,", stages="2", layers_per_stage="5")


@pytest.mark.parametrize("name", ["megatron-core", "megatron-userbuffers", "megatron-bridge", "torchtitan-async"])
def test_a_system_of_today_hides_more_than_the_usual_one(name, run):
    row = run(8, 32, "1d_sp,t=2", stages="2", chunks="2", zero="1")
    step = under(row, **{k: v for k, v in vars(read_system(name)).items() if k != "constants"})
    assert step.seconds < under(row, repeats_all=True).seconds and math.isfinite(step.seconds)


def test_a_precision_that_is_scaled_by_blocks_is_a_row_s_too(run):
    scaled, whole = (run(1, 4, "serial,", precision=name) for name in ("mxfp8", "fp8"))
    assert scaled.predict_price({}) == whole.predict_price({}) and scaled.rival_key != whole.rival_key


def multiplied(work: PassWork) -> float:
    """FLOPs of a pass's products of matrices, without attention's."""
    return sum(n * product.flops for part, n in work.parts for product in part.products)


def test_multi_token_prediction_is_a_layer_and_a_head_each(run):
    """On the last stage, in both passes and in the FLOPs of a step; in the update, a layer without a head."""
    more = {"stages": "2", "layers_per_stage": "4"}
    none, two = (run(2, 8, "serial,", **more, mtp=n) for n in ("", "2"))
    d, length, vocab = 4096, 2048, 32000
    layer, head = 24 * d * d, 2 * d * vocab
    for times, way in ((1, "forward"), (2, "backward")):
        (first, last), before = getattr(two.work, way), getattr(none.work, way)
        assert multiplied(first) == multiplied(before[0])
        assert multiplied(last) == times * length * ((4 + 2) * layer + (1 + 2) * head)
    added = two.counted_flops - none.counted_flops
    assert added == pytest.approx(3 * 8 * length * 2 * (layer + 4 * d * length + head))
    assert two.predict_price({}).seconds > none.predict_price({}).seconds
    parameters = two.work.once[1].masters - none.work.once[1].masters
    assert 2 * 12 * d * d < parameters < 2.01 * 12 * d * d and two.work.once[0] == none.work.once[0]
    single = [multiplied(run(1, 8, "serial,", mtp=n).work.forward[0]) for n in ("0", "1")]
    assert single[1] - single[0] == length * (layer + head)


def test_multi_token_prediction_without_a_price_is_refused(run):
    """All reasons at once; a number that is none by its column."""
    with pytest.raises(ConfigError) as refused:
        run(2, 8, "serial,", stages="2", mtp="9", **{"model.kind": "encoder"})
    reasons = [line.partition("column ")[2] for line in refused.value.violations]
    assert reasons == [
        "mtp=9: model.kind=encoder has none, model.kind=decoder may; nearest legal: 0",
        "mtp=9: must be <= 8, the model's layers; nearest legal: 0",
        "mtp=9: needs layers_per_stage, to which the last stage adds them; nearest legal: 0",
    ]
    with pytest.raises(ConfigError, match="column mtp=one: must be a whole number"):
        run(1, 8, "serial,", mtp="one")
    with pytest.raises(ConfigError, match="column layers_per_stage=5: must add up to 8 layers in 2 chunks"):
        run(2, 8, "serial,", stages="2", mtp="2", layers_per_stage="5")


def count_again(runs: list[MeasuredRun], of) -> float:
    """How much more, of what `of` says, the backward passes of the first run have than those of the second."""
    first, second = (sum(n * of(part) for w in run.work.backward for part, n in w.parts) for run in runs)
    return first - second


WIDE, DEEP = 4096, {"model": "deepseek_v3", "experts": "8"}
UP = 1536 * 32 * 192 + 512 * 32 * 256  # weights: of queries, of keys and values
SHARED, ROUTED = 3 * WIDE * 2048, 8 * 3 * WIDE * 2048 + 256 * WIDE
AGAIN = {
    "mla_up_proj": 8 * UP,
    "mlp": 3 * 3 * WIDE * 18432,
    "shared_experts": 5 * SHARED,
    "moe": 5 * (SHARED + ROUTED),
    "moe moe_act shared_experts": 5 * (SHARED + ROUTED),
    "mla_up_proj mlp": 8 * UP + 3 * 3 * WIDE * 18432,
    "moe_act layernorm": 0,
}


@pytest.mark.parametrize("words", AGAIN)
def test_what_a_word_computes_again(run, words):
    """Of eight layers, three dense: the products of its operations, each once."""
    runs = [run(8, 8, "serial,", **DEEP, recompute=text) for text in (words, "none")]
    again = count_again(runs, lambda part: sum(product.flops for product in part.products))
    assert again == pytest.approx(2 * 2048 * AGAIN[words], rel=1e-3)
    assert runs[0].predict_price({}).seconds > runs[1].predict_price({}).seconds or not AGAIN[words]
    counted = [
        row.counted_flops for row in (run(8, 8, "serial,", **DEEP, recompute=words, counted="hardware"), runs[1])
    ]
    assert counted[0] - counted[1] == pytest.approx(8 * 2 * 2048 * AGAIN[words], rel=1e-3)


def test_attention_is_computed_again_by_its_word(run):
    runs = [run(8, 8, "1d,t=8", recompute=text) for text in ("core_attn", "none")]
    assert count_again(runs, lambda part: part.fused) == sum(n * p.fused for p, n in runs[1].work.forward[0].parts) > 0


@pytest.mark.parametrize("width", [2048, 4096])
@pytest.mark.parametrize("word", ["layernorm", "moe_act"])
def test_norms_and_activations_are_made_again_once(tmp_path, width, word):
    """Products make their inputs again in every price of a width from 4096 on: the word adds nothing there."""
    path, row = tmp_path / "table.csv", f"h100,8,2,{width},16,2048,512,1,8,1d,t=8,1,8,2"
    columns = f"{HEAD},model_experts,experts_per_token,recompute"
    path.write_text(f"{columns}\nword,{row},{word}\nnone,{row},none\n")
    again = count_again(read_measured_runs(str(path), compose_config), lambda part: part.bytes)
    per_layer = {"layernorm": 2 * 2048 * width, "moe_act": 2 * 2048 * 4 * width // 8}[word]
    assert again == (2 * per_layer * 2 * 4 if width < 4096 else 0)  # layers; read and written, of four bytes


LEGAL = (
    "nothing of this model is computed again by that name; nearest legal: none, selective, full, core_attn, layernorm"
)


@pytest.mark.parametrize("words,unknown,more,legal", [
    ("mla_up_proj", "mla_up_proj", {}, "mlp"),
    ("moe_act layrnorm", "layrnorm moe_act", {}, "mlp"),
    ("full moe_act", "full", EXPERTS, "moe, moe_act"),
    ("mla_up_proj", "mla_up_proj", {"model": "deepseek_v2_lite"}, "mlp, moe, moe_act, shared_experts"),
])  # fmt: skip
def test_words_that_name_nothing_of_the_model_are_refused(run, words, unknown, more, legal):
    """With the words of this model; where no latent is projected to queries, their product has no price by itself."""
    with pytest.raises(ConfigError) as refused:
        run(8, 8, "1d_sp,t=8", recompute=words, **more)
    (line,) = refused.value.violations
    assert line.endswith(f"row 1: column recompute={unknown}: {LEGAL}, {legal}")
