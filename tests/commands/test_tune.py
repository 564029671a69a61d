"""`python -m platform.tune`: what it chooses, why, and that this is what runs, from 20 records to a chat."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from platform import launch, tune
from platform.boundary import interrupts
from platform.cluster import resources
from platform.config.arguments import parse_typed_values
from platform.generate import main as generate
from platform.launch import compose_config
from platform.weights.__main__ import main as convert
from tests.commands.tuned import write_model, write_records
from tests.docs.qwen_folder import write_model as write_qwen
from tests.harness import warm
from tests.harness.commands import in_this_process, lines

full = pytest.mark.full
SMALL = """cluster.device=cpu train.steps=4 train.global_batch=4 optimizer.warmup_steps=1 optimizer.lr=0.01 eval.every=2
checkpoint.every=2 monitor.sample=0 data.cache=cache""".split()
INLINE = ["cluster=inline", *SMALL]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model and records of every kind."""
    home = tmp_path_factory.mktemp("tuned")
    write_model(home / "hf")
    write_records(home)
    (home / "texts").mkdir()
    (home / "texts" / "a.md").write_text("the east gate opens at six\n" * 50)
    return home


@pytest.fixture
def chosen(folder, monkeypatch, capsys):
    """`chosen(*typed)`: the recipe, its reason, and the words of the command that is launched, as it is printed."""
    monkeypatch.chdir(folder)
    launched: list[list[str]] = []
    monkeypatch.setattr(launch, "main", lambda words: launched.append(words))

    def run(*typed: str) -> tuple[str, str, list[str]]:
        capsys.readouterr()
        status = tune.main(list(typed))
        out, error = capsys.readouterr()
        assert status == (launch.DONE if "--plan" in typed else None), error
        said, command = out.splitlines()
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "platform.launch"]
        assert launched == ([] if "--plan" in typed else [words[3:]])
        launched.clear()
        recipe, _, reason = said.removeprefix("recipe: ").partition(", ")
        return recipe, reason, words[3:]

    return run


def refused(capsys, *typed: str) -> list[str]:
    capsys.readouterr()
    assert tune.main(list(typed)) == launch.REFUSED
    out, error = capsys.readouterr()
    assert out == ""
    return [line.removeprefix("tune: ") for line in error.splitlines()]


def tuned(folder: Path, *typed: str) -> subprocess.CompletedProcess[str]:
    done = warm.run_module("platform.tune", "hf", "talks.jsonl", *typed, cwd=folder, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in lines(run / "metrics.jsonl") if "loss" in row]


def test_from_records_to_a_chat(folder, monkeypatch, capsys):
    """It trains, stops, goes on by the same command, answers and is exported; two workers do what one does."""
    monkeypatch.chdir(folder)
    first = tuned(folder, *INLINE, "run.dir=one", "train.stop_at=2")
    assert first.stdout.startswith("recipe: fine_tune, as all weights take ")
    again = tuned(folder, *INLINE, "run.dir=one")
    assert again.stdout.startswith(f"recipe: fine_tune, with which the run in {folder}/one was begun\n")
    assert "continues after step 2" in again.stdout and len(losses(folder / "one")) == 4
    for name in ("generate one The --chat", "evaluate one", "weights export one/checkpoints one/transformers"):
        assert f"python -m platform.{name}  # " in again.stdout
    tuned(folder, "cluster=processes", "--workers", "2", *SMALL, "run.dir=two")
    assert losses(folder / "two") == pytest.approx(losses(folder / "one"), rel=1e-5)
    assert losses(folder / "one")[-1] < 0.9 * losses(folder / "one")[0]
    capsys.readouterr()
    assert generate(["one", "When does the east gate open?", "--chat", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.strip()
    assert convert(["export", "one/checkpoints", "one/transformers"]) == 0
    assert load_file("one/transformers/model.safetensors").keys() == load_file("hf/model.safetensors").keys()


@full
def test_a_signal_stops_the_run_and_the_same_command_goes_on(folder):
    """Commands ignore signals once they are done: the run that follows must not."""
    typed = [sys.executable, "-m", "platform.tune", "hf", "talks.jsonl", *INLINE, "train.steps=3000", "run.dir=stopped"]
    with subprocess.Popen(typed, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        metrics, end = folder / "stopped" / "metrics.jsonl", time.monotonic() + 200
        while process.poll() is None and not (metrics.exists() and metrics.read_text()) and time.monotonic() < end:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=200)
    assert process.returncode == launch.STOPPED, out
    assert "python -m platform.launch +experiment=fine_tune " in out.splitlines()[-1], "what continues it"


def test_handlers_are_kept_over_a_command(monkeypatch):
    monkeypatch.setattr(interrupts, "_is_command", True)
    before = {number: signal.getsignal(number) for number in interrupts.ENDING}
    with interrupts.keep_handlers():
        assert interrupts.run_interruptible(lambda: 3) == 3
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert {number: signal.getsignal(number) for number in interrupts.ENDING} == before


KINDS = {
    "talks.jsonl": ("fine_tune", "instructions"), "prompts.jsonl": ("fine_tune", "instructions"),
    "pairs.jsonl": ("preferences", "preferences"), "texts.jsonl": ("fine_tune", "text"), "texts": ("fine_tune", "text"),
}  # fmt: skip


@pytest.mark.parametrize("data", ["talks.jsonl", "texts", *(pytest.param(d, marks=full) for d in [*KINDS][1:4])])
def test_the_kind_of_the_data_decides(chosen, data):
    recipe, _, words = chosen("hf", data, "cluster=inline")
    config = compose_config(words)
    assert (recipe, config.data.kind) == KINDS[data] and config.data.path.endswith(data)
    assert config.train.init == config.data.tokenizer and config.train.init.endswith("/hf")


def test_what_is_typed_goes_before_what_is_chosen(chosen, folder):
    assert chosen("hf", "talks.jsonl", "cluster=inline", "tune=lora")[0] == "lora"
    recipe, _, words = chosen("hf", "pairs.jsonl", "cluster=inline", "tune.rank=3", "preference=ipo", "--plan")
    config = compose_config(words)
    assert (recipe, config.tune.rank, config.train.loss) == ("preferences_lora", 3, "ipo")
    recipe, _, words = chosen("hf", "talks.jsonl", "cluster=inline", "+experiment=one_gpu", "cluster.device=cpu",
                              "precision=fp32", "parallel.zero=0")  # fmt: skip
    assert recipe == "one_gpu" and words.count("parallel.zero=0") == 1 and "parallel.zero=-1" not in words
    (folder / "it's, [mine]").mkdir(exist_ok=True)
    odd = folder / "it's, [mine]" / "a=b.jsonl"
    odd.write_text((folder / "talks.jsonl").read_text())
    assert compose_config(chosen("hf", str(odd), "cluster=inline")[2]).data.path == str(odd)


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters="$"), min_size=1)


@given(WORDS.filter(lambda text: text[0] not in "'\"" and not text.endswith(" ")))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_name_of_a_file_is_typed_as_it_is(name):
    path = f"mine/{name}"
    assert parse_typed_values([f"data.path={tune._quote_if_needed(path)}"]) == {"data.path": path}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen") / "Qwen3-8B"
    write_qwen(folder)
    return folder


FITS = [
    (["--hardware", "h100", "--workers", "8"], "fine_tune"),
    (["--hardware", "h100", "--workers", "1"], "fine_tune_offload"),
    (["--hardware", "l4", "--workers", "1"], "lora"),
]


@pytest.mark.parametrize(("devices", "wanted"), FITS)
def test_the_first_recipe_that_fits_is_taken(chosen, qwen, devices, wanted):
    recipe, reason, words = chosen(str(qwen), "talks.jsonl", "--plan", *devices)
    assert recipe == wanted and ("; fine_tune: no plan for 1 worker fits " in reason) == (wanted != "fine_tune")
    config = compose_config(words)
    assert (config.precision, config.cluster.device, config.cluster.hardware) == ("bf16", "cuda", devices[1])
    assert config.optimizer.offload == ("states+masters" if wanted == "fine_tune_offload" else "none")
    assert (config.model.length, config.parallel.data) == (4096, int(devices[-1]))
    assert config.plan.search == ["parallel.zero"]


def test_devices_are_those_that_are_there(chosen, qwen, monkeypatch):
    monkeypatch.setattr(resources, "gpu_count", lambda: 4)
    monkeypatch.setattr(resources, "_find_smallest_gpu", lambda: resources.Device(24e9, "L4"))
    recipe, reason, words = chosen(str(qwen), "talks.jsonl", "model.length=2048", "--plan")
    assert recipe == "fine_tune_offload" and " GB on each of 4 workers; fine_tune: no plan for 4 workers " in reason
    assert "parallel.data=4" not in words, "the same command goes on with others"


def test_none_that_fits_is_refused_with_a_line_for_each(folder, qwen, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    said = refused(
        capsys, str(qwen), "talks.jsonl", "--hardware", "t4", "--workers", "1", "precision=fp16", "model.length=32768"
    )
    assert [line.partition(": ")[0] for line in said] == ["fine_tune", "fine_tune_offload", "lora", "qlora"]
    assert all(" fits 16 GB; the one that needs least, " in line for line in said)
    said = refused(capsys, str(qwen), "talks.jsonl", "--hardware", "h100")
    assert said == ["--workers=0: no h100 is here to be counted; nearest legal: 8"]


def test_a_run_keeps_the_recipe_with_which_it_was_begun(chosen, folder):
    first = chosen("hf", "talks.jsonl", *INLINE, "tune=lora")[2]
    assert in_this_process(*first, "run.dir=kept", "train.stop_at=1", cwd=folder).returncode == launch.DONE
    recipe, reason, _ = chosen("hf", "talks.jsonl", *INLINE, "run.dir=kept")
    assert (recipe, reason) == ("lora", f"with which the run in {folder}/kept was begun")
    processes = [word.replace("inline", "processes") for word in INLINE]
    recipe, _, words = chosen("hf", "talks.jsonl", *processes, "run.dir=kept", "--workers", "2")
    assert recipe == "lora" and "parallel.data=2" in words, "it went on with all workers that there are"
    _, _, words = chosen("kept", "pairs.jsonl", *INLINE, "--plan")
    config = compose_config(words)
    assert config.train.init.startswith(f"{folder}/kept/checkpoints/step-00000001-") and config.model.d_model == 32


def test_all_mistakes_are_said_at_once(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    typed = ["nobody/none", "talkz.jsonl", "--workers", "0", "--hardware", "h1000", "train.stpes=3", "seed=-1"]
    assert [line.partition(": ")[0] for line in refused(capsys, *typed)] == [
        "--workers=0", "--hardware", "MODEL=nobody/none", "DATA=talkz.jsonl", "train.stpes=3", "seed=-1",
    ]  # fmt: skip
    said = refused(capsys, "hf", "talks.jsonl", "cluster=inline", "train.stpes=3", "model.heads=5", "x")
    assert [line.partition("=")[0] for line in said[:2]] == ["train.stpes", "x: must be KEY"] and len(said) >= 3
    said = refused(capsys, "texts", "talks.jsonl", "--config-dir", "nowhere")
    assert [line.partition("=")[0] for line in said] == ["MODEL", "--config-dir"]
    assert not (folder / "runs").exists()


def test_a_model_in_the_cache_of_hugging_face(chosen, folder, tmp_path, monkeypatch):
    """By its name alone; nothing is fetched."""
    from huggingface_hub import constants

    snapshot = tmp_path / "models--me--tiny" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(folder / "hf")
    (tmp_path / "models--me--tiny" / "refs").mkdir()
    (tmp_path / "models--me--tiny" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert f"model.source={snapshot}" in chosen("me/tiny", "talks.jsonl", "cluster=inline", "--plan")[2]


STRANGE = {
    "[1]\n": "line 1 is a JSON list",
    "{\n": "line 1 is ",
    "": "holds no record",
    '{"question": "a", "answer": "b"}\n': "line 1 is of no known form; its fields: question, answer; nearest legal: ",
    '{"text": null}\n': "line 1 is of no known form; its fields: text; nearest legal: data=KIND data.field=NAME",
}


@pytest.mark.parametrize("text", STRANGE)
def test_records_of_no_known_form(folder, tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(folder)
    (tmp_path / "x.jsonl").write_text(text)
    [line] = refused(capsys, "hf", str(tmp_path / "x.jsonl"))
    assert line.startswith(f"DATA={tmp_path}/x.jsonl: {STRANGE[text]}")


def test_files_of_several_kinds(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    (tmp_path / "b.jsonl").write_text((folder / "pairs.jsonl").read_text())
    [line] = refused(capsys, "hf", str(tmp_path))
    both = f"{tmp_path}/b.jsonl of preferences and {tmp_path}/a.jsonl of text"
    assert line == f"DATA={tmp_path}: holds {both}; nearest legal: files of one kind, or data=KIND"
