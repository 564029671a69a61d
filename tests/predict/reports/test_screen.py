"""A plan on one screen, in full, as data and beside another plan."""

import json
import shlex
import subprocess
import sys

import pytest

from platform import launch
from platform.boundary.refusals import ConfigError
from platform.cluster.shown_commands import PhaseTimes
from platform.config.composition import open_composer
from platform.launch import compose_config
from platform.plan.__main__ import main
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_peak_bytes
from platform.predict.plan_screen import LINES
from platform.predict.remedies import Device, violation_of_memory
from platform.predict.step_price import choose_pricing_hardware, step_price

SMALL = "+experiment=gpt_quick model.layers=2 model.d_model=64 model.length=64 train.global_batch=8 train.microbatch=2"
PARTS = ("plan  ", "  parameters ", "  step ", "memory of the worker", "  total ", "a step on ", "  altogether ")
SEVERAL = "moved in a step", "when a worker is lost", "  formation ", "  recovery "
EXPERIMENTS = {
    SMALL: SEVERAL,
    "+experiment=moe_quick": SEVERAL,
    "+experiment=two_layer": (),
    f"{SMALL} cluster.gpu=H100-80GB precision=bf16 parallel.data=8 parallel.zero=1 --tiers node=2,rack=4": (
        "  snapshot ",
        "of H100-80GB's 80 GB",
        "of collectives beside computing: links are busy for ",
    ),
    f"{SMALL} cluster.device_memory=0.0035": ("limited by memory: it does not fit", "what would make it fit"),
}
KEYS = """mesh groups collectives communication attention_kernels bytes_per_layer tiers parameters_per_worker
bytes_per_worker saved_elements_per_worker attention_work warnings snapshots time failures memory changes""".split()


def shown(capsys, typed: str) -> str:
    assert main(shlex.split(typed)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("typed", EXPERIMENTS)
def test_a_screen_has_all_parts(typed, capsys):
    out = shown(capsys, typed)
    assert len(out.splitlines()) <= LINES
    assert all(
        any(line.startswith(part) or part in line for line in out.splitlines()) for part in (*PARTS, "limited by ")
    )
    assert all(part in out for part in EXPERIMENTS[typed])


@pytest.mark.parametrize(
    ("workers", "legal"), [(2, "4, parallel.data=-1"), (3, "4"), (4, ""), (8, "4, parallel.data=-1")]
)
def test_workers_that_the_plan_does_not_have_are_refused(workers, legal, capsys):
    status = main([*shlex.split(SMALL), "--workers", str(workers)])
    out, err = capsys.readouterr()
    constraint = f"all sizes of the plan are set, for data 2 x t 2; plan.search=[all] seeks one for {workers}"
    line = f"config: --workers={workers}: {constraint}; nearest legal: {legal}\n"
    assert (status, err) == ((2, line) if legal else (0, "")) and ("plan  4 workers" in out) == (not legal)
    assert main([*shlex.split(SMALL), "--workers", str(workers), "--diff", "", "seed=2"]) == status


def test_all_is_the_long_output_and_more(capsys):
    out = shown(capsys, f"{SMALL} --all")
    assert all(part in out for part in ("groups (ranks)", "collectives", "bytes per step, all workers", "limited by "))


def test_keys_of_the_data_are_kept(capsys):
    report = json.loads(shown(capsys, f"{SMALL} --json"))
    assert [key for key in KEYS if key not in report] == []
    assert {"seconds", "parts", "mfu", "days", "computing"} <= report["time"].keys()
    assert {"parameters", "total", "stage"} <= report["memory"].keys() and {"bytes", "every"} <= report[
        "snapshots"
    ].keys()


def test_a_change_gains_what_is_said_when_it_is_typed(capsys):
    report = json.loads(shown(capsys, f"{SMALL} --json"))
    assert report["changes"]
    for change in report["changes"]:
        config = compose_config([*shlex.split(SMALL), *change["typed"]])
        plan = make_plan(config)
        config.parallel.data = plan.num_replicas
        price = step_price(config, plan, choose_pricing_hardware(config))
        assert price.seconds == change["seconds"] < report["time"]["seconds"]
        assert plan.mesh.world_size == 4


def test_changes_of_a_plan_that_does_not_fit_do(capsys):
    report = json.loads(shown(capsys, f"{SMALL} cluster.device_memory=0.0035 --json"))
    assert report["memory"]["total"] > 3.5e6 and report["changes"]
    for change in report["changes"]:
        config = compose_config([*shlex.split(SMALL), *change["typed"]])
        assert predict_peak_bytes(config, make_plan(config)) == change["memory"] <= 3.5e6


def test_two_plans_side_by_side(capsys, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(shown(capsys, f"{SMALL} --json"))
    typed = shown(capsys, f"{SMALL} --diff '' 'parallel.zero=1 train.microbatch=4'")
    assert typed.startswith("A  as it is\nB  parallel.zero=1 train.microbatch=4\n")
    rows = [line.split() for line in typed.splitlines()]
    (altogether,) = [row for row in rows if row[:1] == ["altogether"]]
    assert float(altogether[-1]) < 1 and ["failures:", "alike"] in rows
    filed = shown(capsys, f"{SMALL} --diff {file} 'parallel.zero=1 train.microbatch=4'")
    assert filed.splitlines()[1:] == typed.splitlines()[1:]
    alike = json.loads(shown(capsys, f"{SMALL} --json --diff {file} ''"))
    assert not any(alike.values())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no JSON"),
        ("[]", "which --json writes"),
        ("{}", "lacks 'memory'"),
    ],
)
def test_a_side_that_is_no_plan_is_refused(text, reason, capsys, tmp_path):
    file = tmp_path / "a.json"
    if text is not None:
        file.write_text(text)
    assert main([*shlex.split(SMALL), "--diff", str(file), str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("config: --diff") and reason in error and len(error.splitlines()) == 1


def test_a_side_with_a_mistake_is_refused_as_everywhere(capsys):
    assert main([*shlex.split(SMALL), "--diff", "", "train.microbatchs=1"]) == 2
    assert "train.microbatchs=1: unknown key; nearest legal: train.microbatch" in capsys.readouterr().err


def test_a_quotation_without_an_end_is_refused(capsys):
    assert main([*shlex.split(SMALL), "--diff", "", "'train.microbatch=1"]) == 2
    assert "No closing quotation" in capsys.readouterr().err


def test_a_screen_needs_no_torch():
    run = f"from platform.plan.__main__ import main; main({shlex.split(SMALL)})"
    code = f"import sys; {run}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


EIGHT_BILLION = (
    "+experiment=fine_tune model=llama_8b parallel.data=8 cluster.gpu=H100-80GB cluster.device=cuda precision=bf16"
    " data=text data.path=corpus"
)


def test_the_recipe_for_fine_tuning_fits_eight_billion_parameters_on_a_node(capsys):
    report = json.loads(shown(capsys, f"{EIGHT_BILLION} --json"))
    assert report["memory"]["total"] < report["device"]["memory"] == 80e9


def test_several_cheap_keys_are_changed_where_one_is_not_enough_and_the_last_line_is_a_command(capsys):
    too_large = f"{EIGHT_BILLION} train.microbatch=4 recompute=none"
    text = shown(capsys, too_large)
    rows = text.partition("what would make it fit\n")[2].partition("\n\n")[0].splitlines()
    assert rows and all(len(row.strip().partition("  ")[0].split()) > 1 for row in rows)
    command = text.splitlines()[-1]
    assert command.startswith("python -m platform.launch ")
    config = compose_config(shlex.split(command.partition("launch ")[2]))
    assert predict_peak_bytes(config, make_plan(config)) <= 80e9
    with pytest.raises(ConfigError):  # negative control: without the command's changes
        raise ConfigError(violation_of_memory(*planned(too_large), Device(80e9, "a GPU")))


def planned(typed: str):
    config = compose_config(shlex.split(typed))
    return config, make_plan(config)


def test_where_nothing_cheap_makes_it_fit_the_screen_says_how_much_is_lacking(capsys):
    large = f"{EIGHT_BILLION} model.layers=80 parallel.data=1 train.microbatch=4 recompute=none"
    text = shown(capsys, large)
    [line] = [line for line in text.splitlines() if line.startswith("neither another microbatch nor ")]
    typed, lacking = line.partition(": ")[2].split(" lacks least, ")
    config, plan = planned(f"{large} {typed}")
    assert f"{(predict_peak_bytes(config, plan) - 80e9) / 1e9:.3g} GB" == lacking
    assert "platform.launch" not in text


def test_a_run_that_is_refused_for_its_memory_is_told_of_three_keys_too():
    config, plan = planned(f"{EIGHT_BILLION} train.microbatch=4 recompute=none parallel.zero=0")
    line = violation_of_memory(config, plan, Device(42e9, "a GPU"))
    assert "nearest legal: parallel.zero=3 train.microbatch=1 recompute=full (" in line


PLANNED = [
    f"{SMALL} precision=bf16",
    f"{SMALL} precision=bf16 parallel.data=4 parallel.zero=2 train.global_batch=64",
    f"{SMALL} precision=bf16 pipeline=1f1b pipeline.stages=2 parallel.context=2 parallel.data=2",
]


@pytest.mark.parametrize("typed", PLANNED)
def test_a_named_hardware_and_its_gpu_say_the_same_memory(typed, capsys):
    ways = "--hardware h100", "cluster.hardware=h100", "cluster.gpu=H100-80GB"
    by_option, by_key, by_gpu = (json.loads(shown(capsys, f"{typed} {way} --json")) for way in ways)
    assert by_option["memory"] == by_key["memory"] == by_gpu["memory"] and by_gpu["memory"]["reserved"] > 1.5e9
    assert by_option["device"]["memory"] == by_key["device"]["memory"] == by_gpu["device"]["memory"] == 80e9
    assert by_option["failures"] == by_gpu["failures"] and by_option["time"]["seconds"] == by_gpu["time"]["seconds"]
    assert not json.loads(shown(capsys, f"{typed} --hardware cpu --json"))["memory"]["reserved"]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (
            "tensor=2d",
            "tensor=2d: all its axes are 1, nothing is split; tensor.axes.r=N or tensor.axes.c=N splits it; "
            "tensor.axes.t=2, of another scheme, is dropped",
        ),
        ("tensor=2d tensor.axes.r=2", ""),
        ("tensor=1d tensor.axes.t=1", ""),
        ("tensor=1d_sp", ""),
        ("tensor=serial", ""),
        ("parallel.data=4", ""),
    ],
)
def test_a_scheme_that_splits_nothing_is_told_once(typed, line, capsys):
    assert main(shlex.split(f"{SMALL} {typed}")) == 0
    assert capsys.readouterr().err.splitlines() == [line] * bool(line)
    with open_composer(None) as composer:
        lines, job = launch._plan_job(composer, shlex.split(f"{SMALL} {typed}"), PhaseTimes())
    assert lines == [] and job and capsys.readouterr().err.splitlines() == [line] * bool(line)
