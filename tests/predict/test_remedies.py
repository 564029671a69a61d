"""A plan that needs more than a device has is refused with changes that fit."""

from __future__ import annotations

import re
from unittest import mock

import pytest

from platform.boundary.refusals import ConfigError
from platform.cluster.callbacks import demonstration_warning
from platform.launch import CONF, compose_config, main
from platform.plan.accelerators import nominal_memory
from platform.predict import remedies
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_footprints, predict_peak_bytes
from platform.predict.remedies import REMEDIES_SHOWN as SHOWN
from platform.predict.remedies import (
    Device,
    find_best_changes,
    iterate_fitting_changes,
    violation_of_host_memory,
    violation_of_memory,
)
from platform.predict.search import choose_plan, format_choice, format_ranking
from platform.predict.step_price import read_hardware
from tests.harness.oracle import configure

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_fits_the_gpu_that_it_names(name):
    """Within 90 %: the rest is the driver's, the libraries' and what lies in pieces."""
    config = compose_config([f"+experiment={name}"])
    if config.cluster.device != "cuda":
        assert not config.cluster.gpu
        return
    memory = nominal_memory(config.cluster.gpu)
    assert memory and predict_peak_bytes(config, make_plan(config)) <= 0.9 * memory


def test_gpt175b_keeps_its_model_and_batch():
    config = compose_config(["+experiment=gpt175b"])
    m = config.model
    assert (m.layers, m.d_model, m.heads, m.length, m.vocab) == (96, 12288, 96, 2048, 51200)
    assert (config.train.global_batch, config.train.steps) == (1536, 95000)
    assert (config.tensor.axes, config.pipeline.stages, config.pipeline.chunks) == ({"t": 8}, 16, 3)


def configured(**more):
    base = {"tensor": "1d", "axes": {"t": 2}, "precision": "fp32", "microbatch": 8, "layers": 4, "length": 64}
    return configure(**{**base, **more})


@pytest.mark.parametrize("share", [0.98, 0.7, 0.5, 0.3])
def test_what_is_suggested_fits(share):
    c = configured()
    plan = make_plan(c)
    memory = share * predict_peak_bytes(c, plan)
    line = violation_of_memory(c, plan, Device(memory, "a GPU"))
    assert line.startswith("cluster.memory=refuse: a worker needs ") and "a GPU has" in line
    changes = list(iterate_fitting_changes(c, memory))
    assert changes and all(needed <= memory for _, needed in changes)
    assert all(change in line for change, _ in changes[:SHOWN]) or share == 0.3
    assert violation_of_memory(c, plan, Device(predict_peak_bytes(c, plan), "a GPU")) == ""


def test_each_change_is_what_it_says():
    """The bytes after a change are those of the plan that the changed configuration makes."""
    c = configured()
    needs = dict(iterate_fitting_changes(c, 1e18))
    assert needs["train.microbatch=4"] == needed(configured(microbatch=4))
    assert needs["tensor=1d_sp"] == needed(configured(tensor="1d_sp"))
    assert needs["recompute=full"] == needed(configured(recompute="full"))
    assert needs["tensor.axes.t=4"] == needed(configured(axes={"t": 4}))
    assert needs["pipeline=1f1b pipeline.stages=2"] == needed(configured(pipeline="1f1b", stages=2))


def test_zero_is_for_weights():
    c = configured(tensor="serial", axes={}, data=4, microbatch=1, length=4)
    assert next(iterate_fitting_changes(c, needed(c) - 1))[0] == "parallel.zero=1"


TIGHT = ["+experiment=gpt_quick", "cluster=inline", "cluster.device=cpu", "parallel.data=1", "tensor=serial",
         "data=synthetic", "train.steps=1", "eval.every=0", "monitor.sample=0"]  # fmt: skip


def test_the_launcher_refuses_before_anything_is_written(tmp_path, capsys):
    status = main([*TIGHT, f"run.dir={tmp_path}/run", "cluster.device_memory=0.035"])
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2 and not list(tmp_path.iterdir())
    assert line.startswith("config: cluster.memory=refuse: a worker needs 0.0")
    assert "cluster.device_memory=0.035: it has 0.035 GB; nearest legal: train.microbatch=2 (" in line


def test_the_launcher_refuses_what_the_named_gpu_lacks(tmp_path, capsys):
    more = ["recompute=none", "train.global_batch=128"]
    assert main(["+experiment=gpt175b", *more, f"run.dir={tmp_path}/run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "of stage 0 needs" in line and "A100-80GB has 80 GB; nearest legal: train.microbatch=1" in line


def test_the_launcher_warns_where_it_shall(tmp_path, capsys):
    status = main([*TIGHT, f"run.dir={tmp_path}/run", "cluster.device_memory=0.01", "cluster.memory=warn"])
    assert status == 0 and "warning: cluster.memory=warn: a worker needs 0.0" in capsys.readouterr().out


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ConfigError, match="cluster.gpu=A999: unknown; nearest legal: "):
        compose_config(["+experiment=one_gpu", "cluster.gpu=A999"])


def needed(c):
    return predict_peak_bytes(c, make_plan(c))


@pytest.mark.parametrize(("experiment", "said"), [("gpt175b", True), ("one_gpu", False), ("gpt_quick", False)])
def test_a_long_run_on_the_demonstration_text_is_told(experiment, said):
    config = compose_config([f"+experiment={experiment}"])
    line = demonstration_warning(config, make_plan(config), 9e6)
    assert bool(line) == said
    if said:
        assert "299 G tokens" in line
        assert "data=text data.path=" in line and "times over" in line
        config.data.kind = "text"
        assert demonstration_warning(config, make_plan(config), 9e6) == ""


def test_the_numbers_add_up():
    c = configured()
    plan = make_plan(c)
    line = violation_of_memory(c, plan, Device(1.0, "a GPU"))
    shares = re.search(r"\((.*?)\), a GPU", line)[1].split(", ")
    assert len(shares) == 5 and abs(sum(float(s.split()[-1]) for s in shares) * 1e9 - predict_peak_bytes(c, plan)) < 1e5
    assert "legal" not in line and "; no single change suffices: take a smaller model=NAME" in line
    hardly = Device(predict_peak_bytes(c, plan) / 1.2, "a GPU")
    with mock.patch.object(remedies, "iterate_fitting_changes", return_value=()):
        assert violation_of_memory(c, plan, hardly).endswith(" GB; nearest legal: warn")


def test_host_memory_that_a_node_does_not_have():
    """Activations there are planned: what a node lacks is refused, and a job asks for it."""
    c = configured(recompute="full", offload=True)
    plan = make_plan(c)
    [host] = {f.host for f in predict_footprints(c, plan)}
    assert violation_of_host_memory(c, plan, Device(2 * host, "a node"), 2) == ""
    line = violation_of_host_memory(c, plan, Device(2e3, "a node"), 2)
    assert re.fullmatch(r"recompute_offload=true: 2 workers keep \S+ GB in host memory, a node has 2e-06 GB; .*", line)
    c.recompute_offload = False
    assert violation_of_host_memory(c, make_plan(c), Device(0, "a node"), 2) == ""
    c.optimizer.offload, c.cluster.device = "states", "cuda"
    line = violation_of_host_memory(c, make_plan(c), Device(2e3, "a node"), 2)
    assert line.startswith("optimizer.offload=states: 2 workers keep ") and line.endswith("nearest legal: none")


SEVEN = ["+experiment=fine_tune", "model=gpt3_6_7b", "data=synthetic", "parallel.data=1", "precision=bf16"]


def test_what_fits_no_gpu_is_offered_host_memory():
    """By refusals, by the screen of a plan, and by a search; beside a CPU there is no other memory."""
    c = compose_config([*SEVEN, "cluster.gpu=H100"])
    plan, memory = make_plan(c), nominal_memory("H100")
    assert "optimizer.offload=states (72.2 GB)" in violation_of_memory(c, plan, Device(memory, "H100"))
    changes = find_best_changes(c, 7.0, 2 * memory, memory, read_hardware("h100"))
    assert [change.typed for change in changes] == [
        ("optimizer.offload=states",),
        ("optimizer.offload=states+masters",),
    ]
    c.plan.search = ["parallel.zero"]
    with pytest.raises(ConfigError, match="with optimizer.offload=auto one fits: .*optimizer.offload=states"):
        choose_plan(c, 1)
    c.cluster.gpu, c.cluster.device = "", "cpu"
    assert "offload" not in violation_of_memory(c, plan, Device(memory, "a host"))


def test_wide_feed_forward_layers_are_offered_in_chunks():
    """By refusals, and by a search that has all keys open; not where products in 8 bits scale their tokens together."""
    model = "model=llama_8b model.layers=2 model.vocab=4096 model.length=65536 precision=bf16 recompute=full"
    sizes = "parallel.data=1 train.microbatch=1 train.global_batch=4 pipeline=none tensor=serial"
    typed = [*model.split(), *sizes.split(), "cluster.gpu=H100", "cluster.device=cuda"]
    c = compose_config(typed)
    plan, memory = make_plan(c), 25e9
    assert "train.mlp_chunks=4 (19.5 GB)" in violation_of_memory(c, plan, Device(memory, "H100"))
    c.precision = "fp8"
    assert "mlp_chunks" not in violation_of_memory(c, make_plan(c), Device(memory, "H100"))
    with pytest.raises(ConfigError, match="with train.mlp_chunks=-1 one fits: .* train.mlp_chunks=4"):
        choose_plan(compose_config([*typed, "recompute=auto"]), 1, memory)
    everything_open = compose_config([*typed, "plan.search=[all]"])
    standings = choose_plan(everything_open, 1, memory)
    assert everything_open.train.mlp_chunks == 4
    assert standings and "train.mlp_chunks=4" in format_choice(standings)
    assert any("  1." in line and "train.mlp_chunks=4" in line for line in format_ranking(standings, 1))
