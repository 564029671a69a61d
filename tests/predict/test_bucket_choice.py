"""parallel.bucket_mib: by hand, by the links that the configuration names, or as always where it names none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import yaml

from platform.boundary.refusals import ConfigError
from platform.launch import compose_config, prepare_plan
from platform.plan.chunks import BUCKET_MIB
from platform.plan.plan import Plan
from platform.plan.plan_data import decode_plan, encode_plan, plan_digest, plan_summary
from platform.plan.step_collectives import step_collectives
from platform.predict.make_plan import make_plan, settle_for_workers
from platform.predict.replan import replan
from platform.predict.step_price import file_of_hardware
from tests.harness.oracle import configure, counted, examine, run

TWO = ("+experiment=one_gpu", "parallel.data=2")


def size_of(*overrides: str) -> int:
    return make_plan(compose_config([*TWO, *overrides])).bucket_mib


def described(path, latency: float) -> str:
    """Write a hardware whose nodes of one core each are joined by links of 1 Gbit/s; return its file."""
    description = yaml.safe_load(file_of_hardware("cpu").read_text())
    description["node"]["ranks"], description["network"]["latency"] = 1, latency
    path.write_text(yaml.safe_dump(description))
    return str(path)


def test_where_it_comes_from():
    """By hand it is as given, by ZeRO-3 too, which else gathers block by block; unknown links leave it as it was."""
    assert size_of("cluster.gpu=") == BUCKET_MIB
    assert size_of("cluster.gpu=", "cluster.hardware=h100") == size_of("cluster.gpu=H100") > BUCKET_MIB
    assert size_of("cluster.gpu=H100", "cluster.hardware=cpu") != size_of("cluster.gpu=H100")
    assert size_of("cluster.gpu=H100", "parallel.zero=3") == 0
    assert {size_of("cluster.gpu=H100", f"parallel.zero={n}", "parallel.bucket_mib=7") for n in range(4)} == {7}


@pytest.mark.parametrize("value", ["-1", "many", "1.5", "2_000_000"])
def test_refusals(value):
    with pytest.raises(ConfigError, match=r"^parallel.bucket_mib=.*: must be .*; nearest legal: "):
        compose_config([*TWO, f"parallel.bucket_mib={value}"])


def test_a_mistake_in_the_hardware_is_said_once(tmp_path):
    (own := tmp_path / "mine.yaml").write_text("peaks: {}\n")
    with pytest.raises(ConfigError) as refused:
        size_of(f"cluster.hardware={own}")
    assert all("mine.yaml" in line for line in refused.value.violations)
    _, lines = prepare_plan(compose_config([*TWO, f"cluster.hardware={own}"]), [])
    assert lines == refused.value.violations


def test_the_plan_carries_it():
    plan = make_plan(compose_config([*TWO, "cluster.gpu=H100"]))
    assert decode_plan(encode_plan(plan)).bucket_mib == plan.bucket_mib == plan_summary(plan)["bucket_mib"]
    assert plan_digest(replace(plan, bucket_mib=25)) != plan_digest(plan)


def test_workers_and_later_generations_need_no_file(tmp_path):
    """The driver settles it before workers start: they plan the same without the file that describes the hardware, and
    so does a mesh that re-forms at another size."""
    own = described(tmp_path / "mine.yaml", latency=0.1)
    config = compose_config(["+experiment=gpt_quick", "parallel.data=4", f"cluster.hardware={own}"])
    plan, lines = prepare_plan(config, [])
    assert plan and not lines and plan.bucket_mib != BUCKET_MIB
    (tmp_path / "mine.yaml").unlink()
    assert plan_digest(make_plan(config)) == plan_digest(plan)
    fewer = replan(config, 4)
    assert fewer and fewer.plan.mesh.world_size == 4 and fewer.plan.bucket_mib == plan.bucket_mib


H100 = file_of_hardware("h100")
SPLIT = "tensor=1d_sp tensor.axes.t=2 parallel.data=1 train.microbatch=4 elastic.replace=false elastic.min_workers=2"
SETTLED = {
    "gathers in 8 bits": "model=llama_8b model.layers=2 model.length=256 parallel.data=32 parallel.zero=3 "
    "precision=fp8 train.microbatch=1 train.global_batch=32",
    "gathers in 16 bits": "parallel.data=2 parallel.zero=3 precision=bf16",
    "asynchronous products": f"model=llama_8b model.layers=2 {SPLIT} precision=bf16 train.global_batch=4",
    "products too small for them": f"{SPLIT} precision=bf16 model.length=8 model.d_model=256 model.heads=4",
}


@pytest.mark.parametrize("what", SETTLED)
def test_what_a_hardware_decides_is_settled_before_workers_plan(what, tmp_path):
    """Gathers in 8 bits and asynchronous products, by a file that workers lack: on or off, as the driver's plan is."""
    (own := tmp_path / "mine.yaml").write_text(H100.read_text())
    config = compose_config(["+experiment=one_gpu", f"cluster.hardware={own}", "cluster.device=cuda",
                             "cluster.memory=warn", *SETTLED[what].split()])  # fmt: skip
    chosen = make_plan(config)
    settle_for_workers(config, chosen)
    own.unlink()
    placed = make_plan(config, chosen.mesh.world_size, [chunk.stage for chunk in chosen.chunks])
    assert plan_digest(placed) == plan_digest(chosen)
    settled = config.quantise.gather, config.tensor.async_products
    expected = {"gathers in 8 bits": ("on", "auto"), "asynchronous products": ("auto", "on"),
                "products too small for them": ("auto", "off")}  # fmt: skip
    assert settled == expected.get(what, ("auto", "auto"))


@pytest.mark.parametrize(("started", "after"), [("off", "off"), ("on", "auto")])
def test_a_search_after_a_failure_keeps_gathers_that_are_off(started, after):
    """Those that are on may be so by what a start settled of ZeRO-3, which holds for no other."""
    config = compose_config([*TWO, "precision=fp8", "parallel.zero=-1", "cluster.hardware=h100", "cluster.device=cuda"])
    config.parallel.zero, config.quantise.gather = 3, started
    replanned = replan(config, 2)
    assert replanned and replanned.plan.zero < 3 and replanned.config.quantise.gather == after


# A run on these plans

SHAPE = {"layers": 6, "d_model": 64, "data": 2, "microbatch": 2, "tied": False}


def launches(plan: Plan) -> Counter[str]:
    """Return the launches over `data` of a step, by operation, as the plan says."""
    out: Counter[str] = Counter()
    for _, c, times in step_collectives(plan):
        if plan.mesh.order_axes(c.axes) == ("data",):
            out[c.op] += times
    return out


@pytest.fixture(scope="module")
def sizes(tmp_path_factory) -> dict[str, int]:
    """Return the sizes of buckets for links of two latencies."""
    folder, chosen = tmp_path_factory.mktemp("hardware"), {}
    for name, latency in (("prompt", 1e-4), ("slow", 0.1)):
        c = configure(**SHAPE)
        c.cluster.hardware = described(folder / f"{name}.yaml", latency)
        chosen[name] = make_plan(c).bucket_mib
    return chosen


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_run_launches_what_the_plan_says(zero, sizes):
    """In fp64 as one process does, with the plan's bytes; and fewer collectives where links have a high latency."""
    launched = {}
    for name, size in sizes.items():
        c = configure(**SHAPE, zero=zero, bucket_mib=size)
        plan, results = run(c)
        examine(c, plan, results)
        launched[name] = Counter(launch.op for launch in results[0].log if launch.axes == ("data",))
        assert launched[name] == launches(plan)
    assert sum(launched["slow"].values()) < sum(launched["prompt"].values())


def test_negative_control_a_runtime_with_buckets_of_its_own(monkeypatch):
    c = configure(**SHAPE, bucket_mib=0)
    plan, results = run(c, replace(make_plan(c), bucket_mib=1))
    moved = Counter(launch.op for launch in results[0].log if launch.axes == ("data",))
    assert moved == launches(plan) != launches(make_plan(c))
    assert counted(results)


def test_a_search_that_leaves_zero_3_settles_it(tmp_path):
    """As a start does: workers make the plan that the driver chose, and may lack its file of the hardware."""
    file = described(tmp_path / "mine.yaml", 1e-3)
    config = compose_config([*TWO, "parallel.zero=-1", f"cluster.hardware={file}"])
    config.parallel.zero = 3
    replanned = replan(config, 2)
    assert (
        replanned
        and replanned.config.parallel.zero < 3
        and replanned.config.parallel.bucket_mib == replanned.plan.bucket_mib > 0
    )
    (tmp_path / "mine.yaml").unlink()
    assert make_plan(replanned.config) == replanned.plan
    with pytest.raises(ConfigError, match="no such file"):
        make_plan(replace(replanned.config, parallel=replace(replanned.config.parallel, bucket_mib="auto")))
