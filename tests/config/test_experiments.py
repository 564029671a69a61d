"""Every file under conf/ composes, alone and with each other; the models are those that the papers print."""

import re
import shlex

import pytest

from platform.launch import CONF, compose_config
from platform.plan.accelerators import nominal_memory
from platform.plan.model_types import PAIR_LOSSES
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_footprints
from tests.harness.pairwise import cover, product
from tests.harness.suite import suite
from tests.weights.written import written

EXPERIMENTS, MODELS, TENSORS, BRANCHES = (
    sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in ("experiment", "model", "tensor", "branch")
)


TENSORS.remove("auto")  # which plans nothing until it is chosen
CASES = product({"experiment": EXPERIMENTS, "tensor": TENSORS, "branch": BRANCHES}, lambda case: True)
COVER = cover(CASES, plain={"experiment": ["gpt_quick", "t5_large_mod"], "branch": ["none", "dsp"]})


@suite("experiments x schemes x branches", CASES, COVER)
def test_every_experiment_with_every_scheme(case):
    config = compose_config(
        [f"+{group}={option}" if group == "experiment" else f"{group}={option}" for group, option in case.items()]
    )
    assert (config.tensor.scheme, config.branch.kind) == (case["tensor"], case["branch"])
    assert make_plan(config).mesh.world_size >= config.parallel.data


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_begins_with_its_command(experiment):
    package, first, *_ = (CONF / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    assert package == "# @package _global_"
    command, expected = re.fullmatch(r"# (python -m platform\.launch .*?)   +(.+)", first).groups()
    arguments = shlex.split(command)[3:]
    assert arguments[0] == f"+experiment={experiment}" and expected
    make_plan(compose_config(arguments))


def test_what_runs_for_hours_saves_by_the_clock():
    """A crash of the driver costs half an hour at most; a laptop's minutes may be done again."""
    every = {e: compose_config([f"+experiment={e}"]).checkpoint.every for e in EXPERIMENTS}
    short = {"gpt_quick": 0, "elastic_demo": 0, "moe_quick": 0, "two_layer": 0, "cluster_check": 100}
    assert every == {e: short.get(e, "30m") for e in EXPERIMENTS}


OPTIONS = [(p.parent.name, p.stem) for p in sorted(CONF.glob("*/*.yaml"))]


@pytest.mark.parametrize("chosen", OPTIONS, ids="-".join)
def test_every_file_says_what_it_is_and_composes(chosen, tmp_path):
    group, option = chosen
    assert (CONF / group / f"{option}.yaml").read_text().startswith("# ")
    if group not in ("experiment", "hardware", "system"):  # these two are described, and no part of a configuration
        own = {
            "text": ["data.path=x"],
            "pairs": ["model=t5_tiny"],
            "file": ["pipeline.file=x"],
            "from_hf": [f"model.source={tmp_path}/hf", "data.tokenizer=train"],
        }.get(option, [])
        if option == "from_hf":
            written(tmp_path / "hf", "gpt2")
        compose_config([f"{group}={option}", *own])


@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_a_preference_names_its_data_and_its_loss(loss):
    assert sorted([*PAIR_LOSSES, "none"]) == sorted(option for group, option in OPTIONS if group == "preference")
    spelled = compose_config(["+experiment=gpt_quick", "data=preferences", f"train.loss={loss}"])
    assert compose_config([f"preference={loss}", "+experiment=gpt_quick"]) == spelled
    own = compose_config([f"preference={loss}", "+experiment=preferences", "train.loss_settings.beta=0.3"])
    assert (own.train.loss, own.train.loss_settings["beta"], own.optimizer.lr) == (loss, 0.3, 1e-6)
    assert compose_config(["+experiment=preferences", "train.loss=ipo"]).train.loss == "ipo"


def size(model: str) -> int:
    """The number of its parameters."""
    return make_plan(compose_config([f"model={model}"])).parameter_count


# Megatron's table 1 (Narayanan et al. 2021) as printed: billions of parameters, heads, d_model, layers.
TABLE_1 = """
1.7 24 2304 24
3.6 32 3072 30
7.5 32 4096 36
18.4 48 6144 40
39.1 64 8192 48
76.1 80 10240 60
145.6 96 12288 80
310.1 128 16384 96
529.6 128 20480 105
1008.0 160 25600 128
"""


@pytest.mark.parametrize("row", TABLE_1.split("\n")[1:-1])
def test_table_1(row):
    billions, heads, d_model, layers = row.split()
    name = "1t" if billions == "1008.0" else billions.replace(".", "_") + "b"
    model = compose_config([f"model=gpt_{name}"]).model
    assert (model.heads, model.d_model, model.layers) == (int(heads), int(d_model), int(layers))
    assert f"{size(f'gpt_{name}') / 1e9:.1f}" == billions


# Mesh-TensorFlow's table 2 (Shazeer et al. 2018) as printed, but for d_ff 65516, which is 65536: d_ff, heads, billions.
TABLE_2 = """
4096 4 0.14
8192 8 0.22
16384 16 0.37
32768 32 0.67
65536 64 1.28
131072 128 2.48
262144 256 4.90
"""


@pytest.mark.parametrize("row", TABLE_2.split("\n")[1:-1])
def test_mesh_tensorflows_table_2(row):
    d_ff, heads, billions = row.split()
    model = compose_config([f"model=mesh_lm_{heads}"]).model
    assert (model.d_model, model.d_kv, model.d_ff, model.heads) == (1024, 256, int(d_ff), int(heads))
    assert f"{size(f'mesh_lm_{heads}') / 1e9:.2f}" == billions


# Table 3 as printed.
TABLE_3 = """
2048 4 0.15
4096 8 0.24
8192 16 0.42
16384 32 0.77
32768 64 1.48
65536 128 2.89
"""


@pytest.mark.parametrize("row", TABLE_3.split("\n")[1:-1])
def test_mesh_tensorflows_table_3(row):
    d_ff, heads, billions = row.split()
    config = compose_config([f"model=mesh_mt_{heads}", "data=pairs"])
    model = config.model
    assert (model.d_model, model.d_kv, model.d_ff, model.heads) == (1024, 128, int(d_ff), int(heads))
    assert f"{make_plan(config).parameter_count / 1e9:.2f}" == billions


@pytest.mark.parametrize(("model", "billions"), [("gpt_5_9b", "5.9"), ("gpt_91b", "91.1"), ("gpt_162b", "162.2")])
def test_models_of_megatrons_figures(model, billions):
    """The paper prints 5.9, 91 and 162.2."""
    assert f"{size(model) / 1e9:.1f}" == billions


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("transformer_base", 0.0631),
        ("t5_large_mod", 0.7377),
        ("cube_bert", 1.272),
        ("gpt2_124m", 0.1244),
        ("gpt3_125m", 0.1252),
        ("gpt3_1_3b", 1.316),
        ("gpt3_6_7b", 6.658),
        ("gpt3_13b", 12.85),
        ("gpt_175b", 174.6),
        ("llama_8b", 8.030),
        ("olmoe_7b", 6.919),
        ("gpt_oss_20b", 20.91),
        ("gpt_oss_120b", 116.8),
        ("mixtral_8x7b", 46.70),
        ("deepseek_v2_lite", 15.71),
        ("qwen3_235b_a22b", 235.1),
        ("deepseek_v3", 682.6),
    ],
)
def test_the_sizes_of_models(model, billions):
    assert size(model) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_every_model_has_its_size_in_its_name_or_comment():
    assert len(MODELS) >= 18
    for model in MODELS:
        if model == "from_hf":
            continue
        assert re.search(r"\d(\.\d+)?[MB]\b", (CONF / "model" / f"{model}.yaml").read_text()), model


def test_deepseek_v3_fits_and_shrinks_to_a_laptop():
    """Its plan of 2,048 GPUs; and, small, another that the comment of its file shows."""
    plan = make_plan(compose_config(["+experiment=deepseek_v3"]))
    assert plan.mesh.world_size == 2048 and plan.mesh.axes["expert"] == 8 and plan.warnings == ()
    text = (CONF / "experiment" / "deepseek_v3.yaml").read_text()
    shrunk = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#") and "=" in line)
    arguments = [word for word in shrunk.partition("laptop:")[2].split() if "=" in word]
    config = compose_config(["+experiment=deepseek_v3", *arguments])
    assert (config.model.layers, config.parallel.experts, config.precision) == (4, 2, "bf16")
    assert make_plan(config).mesh.world_size == 4


def test_gpt175b_shrinks_to_a_laptop():
    shrunk = "model.layers=2 model.d_model=64 model.heads=4 model.length=32 model.vocab=512 tensor.axes.t=2"
    shrunk += " pipeline.stages=2 pipeline.chunks=2"
    rest = "train.steps=5 train.global_batch=8 train.microbatch=2 cluster.device=cpu"
    config = compose_config(["+experiment=gpt175b", *shrunk.split(), *rest.split()])
    assert (config.model.layers, config.tensor.axes, config.precision) == (2, {"t": 2}, "bf16")
    assert make_plan(config).mesh.world_size == 4


def test_llama_in_8_bits_fits_and_shrinks_to_a_laptop():
    config = compose_config(["+experiment=llama_8b_fp8"])
    plan = make_plan(config)
    assert plan.mesh.world_size == 8 and plan.has_scaled_products
    assert max(f.total_bytes for f in predict_footprints(config, plan)) < 0.8 * (nominal_memory("H100") or 0)
    text = (CONF / "experiment" / "llama_8b_fp8.yaml").read_text()
    shrunk = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    small = compose_config(
        ["+experiment=llama_8b_fp8", *(w for w in shrunk.partition("laptop:")[2].split() if "=" in w)]
    )
    assert make_plan(small).mesh.world_size == 2 and make_plan(small).has_scaled_products
