"""The search for a plan: it finds what brute force finds, nothing illegal and nothing that does not fit."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import product
from math import isfinite, prod

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster import resources
from platform.cluster.shown_commands import Command
from platform.config.validation import violations_of_configuration
from platform.jobs.__main__ import main as write_job
from platform.launch import compose_config
from platform.optimizer.optimizers import OPTIMIZERS, count_states_per_element
from platform.predict import make_plan as planning
from platform.predict import search as ranking
from platform.predict.contender_grid import ContenderGrid
from platform.predict.contenders import CHOOSABLE, Contender, SearchSpace
from platform.predict.estimate import Estimator
from platform.predict.footprint import weight_bytes
from platform.predict.make_plan import make_plan, plan_quickly
from platform.predict.memory_budget import MemoryForecast, predict_peak_bytes
from platform.predict.replan import replan
from platform.predict.search import choose_plan, format_ranking, search_plans
from platform.predict.step_price import choose_pricing_hardware, read_hardware, step_price

TINY = ("model.layers=2", "model.d_model=64", "model.d_ff=128", "model.length=32", "model.vocab=256", "data=synthetic")
LARGE = 1e12  # bytes


def composed(*arguments: str, experiment: str = "gpt_quick"):
    return compose_config([f"+experiment={experiment}", *arguments])


def every_choice(space: SearchSpace, workers: int):
    """All choices of all values for so many workers, legal or not."""
    c = space.config
    for scheme in space.scheme_tables:
        sizes = [range(1, workers + 1) if not n else [n] for n in space.axis_sizes(scheme).values()]
        rest = range(1, workers + 1)
        stages, data = ([n] if n else rest for n in map(space.read_set_size, ("stages", "data")))
        for *axes, s, d in product(*sizes, stages, data):
            if prod(axes) * s * d != workers:
                continue
            schedules = space.single_stage_schedules if s == 1 else space.schedule_choices
            start = Contender(scheme, tuple(axes), stages=s, data=d)
            sizes, again, zero = (space.list_values(part, start) for part in ("microbatch", "recompute", "zero"))
            for (kind, chunks), b, r, z in product(schedules, sizes, again, zero):
                if (b * d <= c.train.global_batch or b == sizes[0]) and s * chunks <= c.model.layers:
                    yield replace(start, kind=kind, chunks=chunks, microbatch=b, recompute=r, zero=z)


def brute_force(config, workers: int, memory: float, hardware) -> float:
    """Seconds of the quickest plan of so many workers that fits."""
    space, seconds = SearchSpace(config), []
    for choice in every_choice(space, workers):
        candidate = space.build_config(choice)
        if violations_of_configuration(candidate) or not (plan := plan_quickly(candidate)):
            continue
        if predict_peak_bytes(candidate, plan) <= memory:
            seconds.append(step_price(candidate, plan, hardware).seconds)
    return min(seconds)


@pytest.mark.parametrize(
    ("arguments", "memory", "hardware"),
    [
        (("tensor=auto", "parallel.data=-1"), LARGE, "cpu"),
        (("tensor=3d", "tensor.axes.y=-1", "tensor.axes.z=-1", "tensor.axes.x=-1", "parallel.data=-1"), LARGE, "h100"),
        (("tensor.axes.t=-1", "pipeline=auto", "parallel.data=-1", "train.microbatch=-1"), LARGE, "cpu"),
        (("tensor.axes.t=-1", "parallel.data=-1", "parallel.zero=-1", "recompute=auto"), 5.5e6, "cpu"),
    ],
)
def test_the_search_finds_what_brute_force_finds(arguments, memory, hardware):
    config, hardware = composed(*TINY, *arguments), read_hardware(hardware)
    outcome = search_plans(config, 8, memory, hardware)
    best = outcome.fitting_finalists[0]
    assert best.price.seconds == pytest.approx(brute_force(config, 8, memory, hardware), rel=1e-3)
    assert best.plan.mesh.world_size == outcome.workers == 8 and best.peak_memory <= memory
    assert not violations_of_configuration(best.config) and make_plan(best.config) == best.plan


def test_the_estimate_is_near_the_price_of_the_plan():
    config, hardware = composed("tensor=auto", "parallel.data=-1"), read_hardware("cpu")
    rated, judged = ContenderGrid(SearchSpace(config), 4, LARGE, hardware).rate_contenders()
    assert judged == 24 and len(rated) > 15
    for one in rated[::3]:
        candidate = SearchSpace(config).build_config(one.choice)
        plan = make_plan(candidate)
        assert one.seconds == pytest.approx(step_price(candidate, plan, hardware).seconds, rel=0.3), one
        assert one.memory == pytest.approx(predict_peak_bytes(candidate, plan), rel=0.6), one


@pytest.mark.parametrize(("stages", "chunks"), [(8, {2, 4, 8}), (16, {2, 4})])
def test_layers_that_stages_do_not_divide_are_interleaved_too(stages, chunks):
    """Llama 3's 126 layers: a stage has 16 or 8 at most, in one chunk or in several, and a shorter bubble in these."""
    sizes = "model.layers=126", "model.d_model=4096", "model.heads=32", "model.d_ff=16384", "model.length=2048"
    keys = "train.global_batch=64", "train.microbatch=1", "tensor.axes.t=2", "parallel.data=1", "precision=bf16"
    overrides, hardware = (*sizes, *keys, f"pipeline.stages={stages}"), read_hardware("h100")
    finalists = search_plans(
        composed(*overrides, "pipeline=interleaved", "pipeline.chunks=-1"), 2 * stages, LARGE, hardware
    ).tried
    straight = composed(*overrides, "pipeline=1f1b")
    assert {f.choice.chunks for f in finalists} == chunks
    assert finalists[-1].price.seconds < step_price(straight, make_plan(straight), hardware).seconds


@pytest.mark.parametrize(
    ("more", "kinds"),
    [((), {"none", "full"}), (("model.dropout=0.1",), {"none", "selective", "full"}), (("recompute=full",), {"full"})],
)
def test_contenders_have_no_recomputation_that_plans_refuse(more, kinds):
    """One kernel of attention keeps no scores that could be made again; dropout is drawn where no kernel does it."""
    config = composed(*TINY, "cluster.device=cuda", "precision=bf16", "plan.search=[tensor]", "recompute=auto", *more)
    space = SearchSpace(config)
    assert {kind for start in space.list_starts() for kind in space.list_values("recompute", start)} == kinds


def test_the_same_search_has_the_same_outcome():
    config = composed(*TINY, "tensor=auto", "pipeline=auto", "parallel.data=-1", "train.microbatch=-1")
    first, second = (search_plans(config, 6, LARGE, choose_pricing_hardware(config)) for _ in range(2))
    assert [f.choice for f in first.fitting_finalists] == [f.choice for f in second.fitting_finalists]
    assert list(format_ranking(first, 5)) == list(format_ranking(second, 5))


@pytest.mark.parametrize(
    ("part", "others", "value"),
    [
        ("gathered", ("tensor.gathered=auto",), "again"),
        ("recompute_every", ("recompute_every=-1", "recompute=full", "model.layers=96"), 2),
    ],
)
def test_what_may_lack_memory_is_refined(part, others, value):
    """With room for it, a plan is as quick as it can be; with a little less, what it keeps is gathered or computed
    again, and what is chosen is what was priced."""
    sizes = *TINY, "model.layers=8", "tensor=1d_sp", "tensor.axes.t=2", "parallel.data=2", "train.microbatch=8"
    config, hardware = composed(*sizes, *others), read_hardware("h100")
    roomy = search_plans(config, 4, LARGE, hardware)
    assert [getattr(f.choice, part) for f in roomy.tried] == [
        CHOOSABLE[part].values(roomy.space, roomy.tried[0].choice)[0]
    ]
    tight = search_plans(config, 4, roomy.tried[0].peak_memory - 1, hardware)
    best = tight.quickest_fitting_finalist
    assert (
        best and getattr(best.choice, part) == value and best.price.seconds >= (1 - 1e-9) * roomy.tried[0].price.seconds
    )
    typed = composed(*sizes, *others, *tight.space.format_overrides(best.choice))
    assert make_plan(typed) == best.plan


def test_what_does_not_fit_is_not_chosen_and_the_table_says_what_it_lacks():
    arguments = *TINY, "tensor.axes.t=-1", "parallel.data=-1", "parallel.zero=-1", "recompute=auto"
    roomy = search_plans(composed(*arguments), 4, LARGE, read_hardware("cpu"))
    tight = roomy.fitting_finalists[0].peak_memory - 1
    outcome = search_plans(composed(*arguments), 4, tight, read_hardware("cpu"))
    assert (
        outcome.fitting_finalists[0].peak_memory <= tight
        and outcome.fitting_finalists[0].price.seconds >= roomy.fitting_finalists[0].price.seconds
    )
    assert any("lacks" in line for line in format_ranking(outcome, 10))


def test_without_a_plan_that_fits_the_refusal_names_the_one_that_needs_least():
    with pytest.raises(ConfigError) as refused:
        choose_plan(composed(*TINY, "tensor.axes.t=-1", "parallel.data=-1"), 2, memory=1e5)
    (line,) = refused.value.violations
    assert "fits 0.0001 GB; the one that needs least, tensor.axes.t=" in line
    assert line.endswith("parameters and optimizer state alone take 11 such workers")


def test_the_refusal_names_the_key_that_would_help():
    arguments = *TINY, "tensor=serial", "parallel.data=-1", "parallel.zero=-1", "train.microbatch=4", "model.layers=8"
    roomy = search_plans(composed(*arguments, "recompute=auto"), 2, LARGE, read_hardware("cpu"))
    tight = min(f.peak_memory for f in roomy.tried if f.choice.recompute == "full")
    with pytest.raises(ConfigError, match="with recompute=auto one fits: .*recompute=full"):
        choose_plan(composed(*arguments), 2, memory=tight)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_of_any_plan_is_at_least_what_a_search_says(kind):
    """Optimizers that keep less of matrices, or factors of moments, are no reason to give a search up too early."""
    config = composed(*TINY, "plan.search=[recompute]", f"optimizer.kind={kind}", "parallel.data=1", "tensor=serial")
    outcome = search_plans(config, 1, LARGE, read_hardware("cpu"))
    held = weight_bytes(outcome.tried[0].plan, count_states_per_element(config))
    assert outcome.least_state_bytes == held["parameters"] + held["optimizer"]


def test_branches_are_searched_too():
    """Their axes may divide whole experts, and are no axes of a tensor scheme."""
    config = compose_config(["+experiment=t5_large_mod", "plan.search=[all]", "model.layers=2"])
    assert search_plans(config, 4, LARGE, read_hardware("h100")).quickest_fitting_finalist


def test_fewer_replicas_than_are_to_share_experts_are_estimated():
    config = composed("parallel.data=-1", "tensor=1d_sp", "tensor.axes.t=-1", "model.layers=2", experiment="moe_quick")
    assert config.parallel.experts == 4
    rated, _ = ContenderGrid(SearchSpace(config), 2, LARGE, read_hardware("h100")).rate_contenders()
    assert rated and all(isfinite(one.seconds) and isfinite(one.memory) for one in rated)


def test_a_set_key_keeps_its_value_and_an_open_one_is_chosen():
    config = composed(*TINY, "tensor=1d", "tensor.axes.t=-1", "pipeline=auto", "pipeline.stages=2", "parallel.data=2")
    assert config.plan.search == ["tensor.axes.t", "pipeline", "pipeline.chunks"]
    choose_plan(config, 8)
    assert (config.pipeline.stages, config.parallel.data, config.tensor.axes) == (2, 2, {"t": 2})
    assert not violations_of_configuration(config)


def test_a_run_with_fewer_workers_is_planned_by_the_same_search():
    arguments = *TINY, "tensor=auto", "pipeline=auto", "parallel.data=-1"
    config = composed(*arguments)
    choose_plan(config, 8, memory=LARGE)
    for workers in (6, 3):
        fresh = composed(*arguments)
        choose_plan(fresh, workers, memory=LARGE)
        replanned = replan(config, workers, memory=LARGE)
        assert replanned.config == fresh and make_plan(fresh) == replanned.plan


def test_megatrons_heuristics_are_found_again():
    """175B on A100s: tensor parallelism inside a node, pipeline beyond, replicas outermost."""
    arguments = "parallel.data=-1", "pipeline=auto", "tensor=1d_sp", "tensor.axes.t=-1", "recompute=auto"
    config = composed(*arguments, "train.microbatch=1", experiment="gpt175b")
    rated, _ = ContenderGrid(SearchSpace(config), 1536, 80e9, read_hardware("a100_80g")).rate_contenders()
    best = next(one for one in rated if one.memory <= 80e9).choice
    assert 1 < best.axes[0] <= 8 and best.stages > 1 and best.data > 1
    assert [*make_plan(replace(SearchSpace(config).build_config(best))).mesh.axes] == ["stage", "data", "t"]


def test_experts_of_a_large_model_stay_inside_nodes():
    """DeepSeek-V3 on 256 H200: its exchanges between nodes would take as long as all computing. 61 layers are no
    multiple of the stages."""
    open_keys = "pipeline.stages=-1", "parallel.data=-1", "parallel.experts=-1", "parallel.zero=-1"
    config = composed(*open_keys, "train.global_batch=2048", "model.capacity_factor=0", experiment="deepseek_v3")
    rated, _ = ContenderGrid(SearchSpace(config), 256, 130e9, read_hardware("h200")).rate_contenders()
    best = next(one for one in rated if one.memory <= 130e9).choice
    assert 1 < best.experts <= 8 and best.stages > 8


@pytest.mark.full
def test_what_has_room_for_an_even_routing_alone_is_no_finalist():
    """Dropless, experts over all 256 ranks would need 838 GB for the worst routing: the estimate knows that, and the
    quickest plan that fits is found."""
    open_keys = "pipeline.stages=-1", "parallel.data=-1", "parallel.experts=-1", "parallel.zero=-1"
    config = composed(*open_keys, "train.global_batch=2048", "model.capacity_factor=0", experiment="deepseek_v3")
    outcome = search_plans(config, 256, 130e9, read_hardware("h200"))
    assert outcome.quickest_fitting_finalist and outcome.quickest_fitting_finalist.peak_memory < 130e9
    assert outcome.quickest_fitting_finalist.price.seconds < 1.1 * min(f.price.seconds for f in outcome.tried)


def test_the_estimate_of_exchanges_is_near_their_price():
    """Experts over one node, and over many; routing is even, though there is room for the worst."""
    open_keys = "parallel.data=-1", "parallel.experts=-1"
    sizes = (
        "tensor=serial",
        "pipeline=none",
        "model.layers=4",
        "train.global_batch=64",
        "train.microbatch=1",
        "model.capacity_factor=0",
    )
    config, hardware = composed(*open_keys, *sizes, experiment="qwen3_235b_a22b"), read_hardware("h100")
    space = SearchSpace(config)
    choices = [Contender("serial", (), data=64, experts=n, tensor_experts="split") for n in (1, 2, 4, 8, 16, 32, 64)]
    rated = ContenderGrid(space, 64, LARGE, hardware).estimate_choices(
        [replace(c, zero=config.parallel.zero) for c in choices]
    )
    for one in rated:
        candidate = SearchSpace(config).build_config(one.choice)
        assert one.seconds == pytest.approx(step_price(candidate, make_plan(candidate), hardware).seconds, rel=0.3), one


def test_narrow_experts_are_left_whole():
    """Experts of Qwen3, 1,536 wide, beside two tensor ranks: divided, they take fewer and wider products and half of
    the rows of an exchange. Estimates of both are near their prices; a model without experts has no such choice."""
    keys = "parallel.tensor_experts=auto", "parallel.experts=-1", "parallel.data=-1", "tensor=1d_sp", "tensor.axes.t=2"
    sizes = "model.layers=4", "train.global_batch=32", "train.microbatch=1", "model.capacity_factor=0", "pipeline=none"
    config, hardware = composed(*keys, *sizes, experiment="qwen3_235b_a22b"), read_hardware("h100")
    rated, _ = ContenderGrid(SearchSpace(config), 32, LARGE, hardware).rate_contenders()
    prices = {}
    for one in rated:
        candidate = SearchSpace(config).build_config(one.choice)
        price = prices[one.choice.experts, one.choice.tensor_experts] = step_price(
            candidate, make_plan(candidate), hardware
        )
        assert one.seconds == pytest.approx(price.seconds, rel=0.3), one
    assert len(prices) == 2 * 5
    assert all(prices[n, "whole"].seconds < prices[n, "split"].seconds for n in (1, 2, 4, 8, 16))
    best = search_plans(config, 32, LARGE, hardware).quickest_fitting_finalist
    assert best.choice.tensor_experts == "whole" == best.config.parallel.tensor_experts
    assert "parallel.tensor_experts=whole" in SearchSpace(config).format_overrides(best.choice)
    dense = SearchSpace(composed("plan.search=[all]"))
    assert {c.choice.tensor_experts for c in ContenderGrid(dense, 4, LARGE, hardware).rate_contenders()[0]} == {"split"}


def test_a_refusal_for_want_of_gpus_ends_with_a_command_that_runs(monkeypatch):
    monkeypatch.setattr(resources, "_measure_supply", lambda *_: resources.Supply(2, 4, "on this machine"))
    monkeypatch.setattr(resources, "_find_smallest_gpu", lambda: resources.Device(80e9, "NVIDIA H100 80GB HBM3"))
    overrides = ["+experiment=gpt_quick", *TINY, "cluster.device=cuda", "pipeline=1f1b", "pipeline.stages=2"]
    with pytest.raises(ConfigError) as refused:
        resources.reserve_or_suggest(compose_config(overrides), Command(overrides), 8, print, spares=0, least=0)
    (line,) = refused.value.violations
    assert line.startswith("cluster.device=cuda: needs 8 GPUs, 2 there")
    start, _, typed = line.partition("; the best plan for 2 GPUs: python -m platform.launch ")
    assert make_plan(compose_config(shlex.split(typed))).mesh.world_size == 2


def test_a_refusal_for_want_of_memory_ends_with_a_command_that_runs():
    overrides = ["+experiment=gpt_quick", *TINY, "parallel.data=2", "tensor=serial"]
    config = compose_config(overrides)
    plan = make_plan(config)
    device = resources.Device(predict_peak_bytes(config, plan) - 1, "it")
    with pytest.raises(ConfigError) as refused:
        resources.refuse_lack_of_memory(config, plan, device, Command(overrides))
    (line,) = refused.value.violations
    assert line.startswith("cluster.memory=refuse: a worker needs")
    start, _, typed = line.partition("; the best plan for 2 workers: python -m platform.launch ")
    other = compose_config(shlex.split(typed))
    assert make_plan(other).mesh.world_size == 2 and predict_peak_bytes(other, make_plan(other)) <= device.memory
    resources.refuse_lack_of_memory(other, make_plan(other), device, Command(overrides))


def test_only_finalists_up_to_the_first_that_fits_are_measured(monkeypatch):
    measured = []
    monkeypatch.setattr(
        ranking, "MemoryForecast", lambda *arguments: measured.append(arguments) or MemoryForecast(*arguments)
    )
    outcome = search_plans(composed(*TINY, "tensor=auto", "parallel.data=-1"), 4, LARGE, read_hardware("cpu"))
    assert outcome.quickest_fitting_finalist is outcome.tried[0] and len(measured) == 1 < len(outcome.tried)
    assert outcome.fitting_finalists[0] is outcome.quickest_fitting_finalist and len(measured) == len(outcome.tried)


def test_contexts_that_are_slower_than_what_fits_are_not_weighed(monkeypatch):
    """Whether their first kind lacks memory, so that another is taken, matters of what is chosen or shown alone."""
    weighed = []
    monkeypatch.setattr(
        planning, "MemoryForecast", lambda *arguments: weighed.append(arguments) or MemoryForecast(*arguments)
    )
    stated = "cluster.device=cuda", "cluster.device_memory=80"
    config = composed(*TINY, *stated, "tensor=serial", "parallel.data=-1", "parallel.context=-1")
    outcome = search_plans(config, 4, 80e9, read_hardware("h100"))
    contexts = [f for f in outcome.tried if f.choice.context > 1]
    assert contexts and not weighed
    assert [make_plan(f.config) for f in contexts] == [f.settle(80e9).plan for f in contexts] and weighed


def test_stages_that_no_contender_has_are_not_estimated(monkeypatch):
    """Of more chunks than layers; and nothing else is left out."""
    keys = "tensor=serial", "pipeline=auto", "parallel.data=-1", "model.layers=6", "train.global_batch=32"
    config, hardware = composed(*TINY, *keys), read_hardware("h100")
    rated = ContenderGrid(SearchSpace(config), 8, LARGE, hardware).rate_contenders()
    asked = []

    def list_all(self, chunks: int):
        asked.append(chunks)
        return self._groups_by_stages

    monkeypatch.setattr(Estimator, "_list_groups", list_all)
    assert ContenderGrid(SearchSpace(config), 8, LARGE, hardware).rate_contenders() == rated and max(asked) > 1


def test_a_job_is_written_for_the_chosen_plan(capsys):
    typed = ["data=text", "data.path=/shared/corpus", "checkpoint.url=/shared/checkpoints", "job.nodes=1", "job.cpus=8"]
    assert not write_job(["slurm", "+experiment=gpt_quick", *TINY[:-1], *typed, "tensor=auto", "parallel.data=-1"])
    run = capsys.readouterr().out.partition("--run ")[2].partition("cluster=ray")[0]
    assert "auto" not in run and "parallel.data=8" in run and "tensor=serial" in run


@pytest.mark.parametrize(
    ("contender", "name"),
    [
        (Contender("serial", ()), ""),
        (Contender("serial", (), data=64, zero=3), "FSDP 64"),
        (Contender("3d", (64, 2, 1)), "FSDP 64 x TP 2"),
        (Contender("3d", (2, 2, 2)), "3d 8"),
        (Contender("1d_sp", (8,), "interleaved", 8, 4, data=8, zero=1), "TP 8 x PP 8 x ZeRO-1 8"),
        (Contender("2d_gather", (4, 2), context=2, data=2), "2d gather 8 x CP 2 x DP 2"),
        (Contender("serial", (), data=16, experts=8), "EP 8 x DP 16"),
    ],
)
def test_a_plan_has_the_name_that_people_know(contender, name):
    assert contender.common_name == name


def test_with_inputs_in_host_memory_all_else_is_recomputed():
    """The key that a search leaves open is not refused for its default beside recompute_offload."""
    config = composed(*TINY, "recompute_offload=true", "plan.search=[all]")
    assert {f.choice.recompute for f in search_plans(config, 4, LARGE, read_hardware("h100")).tried} == {"full"}
    with pytest.raises(ConfigError, match="recompute_offload"):
        composed(*TINY, "recompute_offload=true", "plan.search=[parallel.data]")
