"""tensor.layout=auto: the layouts of Shazeer et al. where they are best, a quicker one elsewhere."""

from __future__ import annotations

import re
from random import Random

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.composition import CONF
from platform.launch import compose_config
from platform.plan.__main__ import main
from platform.plan.layout import DIMS
from platform.predict.make_plan import list_refusals, make_plan
from platform.predict.step_price import choose_pricing_hardware, step_price
from tests.harness.commands import in_this_process

GPU = ["cluster.device=cuda", "cluster.gpu=A100-80GB"]
TWO = ["+experiment=two_layer", "tensor=layout", "tensor.axes={all: 4}", "model.io=4096", *GPU]
PAPERS = "batch:rows;heads:cols;d_ff:cols;vocab:cols"  # section 9
SPLIT = ("batch", "length", "d_model", "heads", "d_ff", "vocab", "d_kv")
MANY, FEW = (f"train.global_batch={n} train.microbatch={n}".split() for n in (16384, 256))


def seconds(arguments: list[str]) -> float:
    config = compose_config(arguments)
    return step_price(config, make_plan(config), choose_pricing_hardware(config)).seconds


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        ([*TWO, "model.hidden=4096", *MANY], "batch:all"),  # section 8: data parallelism for long batches
        ([*TWO, "model.hidden=16384", *FEW], "hidden:all"),  # and model parallelism for wide layers
        (["+experiment=mesh_lm", "model=mesh_lm_8", "tensor.axes.rows=8", "tensor.axes.cols=8", "train.microbatch=256"],
         PAPERS),
        (["+experiment=mesh_lm"], "heads:rows+cols;d_ff:rows+cols;vocab:rows+cols"),
    ],
    ids=["data", "model", "both", "another"],
)  # fmt: skip
def test_the_best_layout_is_found(arguments, layout):
    said = []
    config = compose_config([*arguments, "tensor.layout=auto"], say=said.append)
    assert config.tensor.layout == layout
    assert said == [f"tensor.layout={layout}: the quickest, as predicted, of layouts on these axes"]


def test_a_quicker_layout_than_the_papers():
    """Of its largest language model on two by four A100s: no batch is split, 6 % quicker as predicted."""
    auto = seconds(["+experiment=mesh_lm", "tensor.layout=auto"])
    assert auto < 0.95 * seconds(["+experiment=mesh_lm", f"tensor.layout={PAPERS}"])


def test_no_drawn_layout_is_quicker():
    """Any legal map of dims to axes, also of fewer dims than could be split."""
    model = ["model.layers=2", "model.d_model=1024", "model.heads=16", "model.length=512", "parallel.data=1", *GPU]
    common = ["+experiment=gpt_quick", "tensor=layout", "tensor.axes.a=2", "tensor.axes.b=4", *model,
              "train.global_batch=32", "train.microbatch=32"]  # fmt: skip
    best, r, legal = seconds([*common, "tensor.layout=auto"]), Random(5), 0
    for _ in range(24):
        dims = r.sample([d for d in DIMS if d in SPLIT], r.randint(1, 2))
        layout = ";".join(f"{dim}:{r.choice(('a', 'b', 'a+b'))}" for dim in dims)
        try:
            config = compose_config([*common, f"tensor.layout={layout}"])
        except ConfigError:
            continue
        if not list_refusals(config):
            legal += 1
            assert step_price(config, make_plan(config), choose_pricing_hardware(config)).seconds > 0.999 * best
    assert legal >= 4


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("tensor.axes={}", "needs sizes of axes; nearest legal: tensor.axes.NAME=2"),
        ("tensor.axes.a=-1", "needs sizes of axes; nearest legal: tensor.axes.a=2"),
        ("tensor.axes.a=7", "no dim can be split over axes of {'a': 7}"),
        ("tensor.axes.a=2 model.heads=5", "model.heads=5: must divide"),
    ],
)
def test_mistakes_are_refused(arguments, line):
    with pytest.raises(ConfigError) as error:
        compose_config(["+experiment=gpt_quick", "tensor=layout", "tensor.layout=auto", *arguments.split()])
    assert line in str(error.value)


def test_it_trains(tmp_path):
    small = (
        "model.layers=1 model.d_model=16 model.heads=2 model.length=8 train.steps=2 data=synthetic cluster=processes"
    )
    rest = "parallel.data=1 optimizer.warmup_steps=0 eval.every=0 monitor.sample=0 checkpoint.last=false"
    words = f"+experiment=gpt_quick tensor=layout tensor.axes.a=2 tensor.layout=auto {small} {rest}".split()
    done = in_this_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--hardware"], []], ids=["option", "key"])
def test_the_layout_is_the_best_on_the_named_hardware(words, tmp_path, capsys):
    """Links that cost nothing split the length, others the batch: by the option of the plan command as by the key."""
    common = ["+experiment=gpt_quick", "tensor=layout", "tensor.axes.a=4", "tensor.layout=auto", "parallel.data=1",
              "model.d_model=512", "model.heads=8", "train.microbatch=256", "train.global_batch=256"]  # fmt: skip
    chosen = {}
    for bandwidth in ("1e18", "1e11"):
        file = tmp_path / f"{bandwidth}.yaml"
        file.write_text(f"like: h100\nnode: {{bandwidth: {bandwidth}, latency: 1e-12, hop: 1e-12}}\n")
        assert main([*common, *words, str(file) if words else f"cluster.hardware={file}"]) == 0
        chosen[bandwidth] = capsys.readouterr().err.partition(":")[0]
    assert chosen == {"1e18": "tensor.layout=length", "1e11": "tensor.layout=batch"}


def test_mistakes_of_the_hardware_are_named_beside_an_open_layout(tmp_path, capsys):
    """As without it: by the option or by the key, and never that no dim can be split."""
    common = ["+experiment=gpt_quick", "tensor=layout", "tensor.axes.a=2", "tensor.layout=auto"]
    h100 = (CONF / "hardware" / "h100.yaml").read_text()
    (tmp_path / "narrow.yaml").write_text(re.sub("peaks: .*", "peaks: {fp16: 9e14}", h100))
    for name, constraint in (("nowhere", "there is no such file"), ("narrow.yaml", "its peaks lack fp32")):
        for words in (["--hardware", str(tmp_path / name)], [f"cluster.hardware={tmp_path / name}"]):
            assert main([*common, "precision=fp32", *words]) == 2
            assert constraint in (refused := capsys.readouterr().err) and "hardware" in refused.partition(":")[2]


def test_slow_links_split_something_too(tmp_path):
    """Who sets an axis splits a dim over it, though a plan that splits nothing would be quicker."""
    file = tmp_path / "slow.yaml"
    file.write_text("like: h100\nnode: {bandwidth: 1e3}\n")
    axis = ["+experiment=gpt_quick", "tensor=layout", "tensor.axes.a=4", "tensor.layout=auto", "parallel.data=1"]
    assert compose_config([*axis, f"cluster.hardware={file}"]).tensor.layout == "batch:a"
