"""What the pages and jobs tell people to type does what they show, up to the start of the workers.

Nothing is trained and nothing outside of this process is started: a training command is composed, planned and finds
its devices; its output is compared down to the first line that needs a worker. `...` stands for any lines.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import BPE

from platform import doctor, launch, tune
from platform.api import Model, list_stored_tensors, translate_config_json
from platform.checkpoint.__main__ import main as inspect_checkpoint
from platform.cluster import calibration_run, driver, resources
from platform.cluster.resources import find_worker_device, refuse_lack_of_memory
from platform.data.__main__ import main as prepare_data
from platform.evaluate import main as measure
from platform.generate import main as write_answers
from platform.jobs.__main__ import main as write_job
from platform.monitor.sinks.__main__ import main as send_run
from platform.plan.__main__ import main as explain_plan
from platform.plan.schedule import table
from platform.plan.simulate import simulate
from platform.predict.choose_schedule import build_schedule
from platform.report.__main__ import main as write_page
from platform.status.__main__ import main as tell_status
from platform.weights import families
from platform.weights.__main__ import main as convert_weights
from tests.docs.pages import FOLDERS, JOBS, LAUNCH, ROOT, Typed, blocks, commands, files
from tests.docs.qwen_folder import write_model, write_talks, write_weights
from tests.harness.commands import QUICK, in_this_process
from tests.harness.registries import as_before
from tests.weights.written import tensors_of, written

COMMANDS = commands()
DRIVE_RUN = driver.drive_run
# How their output starts.
FROM_WORKERS = re.compile(r" +step +loss|continues after|run directory:|what happened|what this run has|rank\d")


class Bench(NamedTuple):
    """Surroundings of a command under test. `folder`: its working directory."""

    folder: Path
    capfd: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch


@pytest.fixture
def bench(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A directory with the files that the pages show, on a machine without GPUs where nothing is started."""
    for path, text in files().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    for folder in ("docs", "platform", "examples/pairs.jsonl"):  # which commands name as text
        (tmp_path / folder).parent.mkdir(exist_ok=True)
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` does
    monkeypatch.setattr(resources, "gpu_count", lambda: 0)
    monkeypatch.setattr(driver, "drive_run", start)
    known = set(sys.modules)
    with as_before():
        yield Bench(tmp_path, capfd, monkeypatch)
    for name in sys.modules.keys() - known:  # a page's own modules register anew for the next command
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def start(config, plan, *, command, phases) -> int:
    """Stand in for the driver: check memory and devices, print what it prints before a worker answers."""
    cluster, size = config.cluster, plan.mesh.world_size
    if cluster.kind != "ray":
        device = find_worker_device(config, "cuda", size) if cluster.gpu or cluster.device_memory else None
        if device:
            refuse_lack_of_memory(config, plan, device, command)
        resources.await_worker_places(cluster, size, lambda line: None if line.startswith("warning:") else print(line))
    print(*driver.list_start_lines(config, plan, "cpu"), f"starting {size} workers ({cluster.kind}, cpu)", sep="\n")
    if 1 < plan.num_stages <= 4:  # simulating hundreds of microbatches on many stages takes seconds
        s = build_schedule(config, plan.num_replicas)
        title = f"schedule  {s.name}: {s.stages} stages x {s.chunks} chunks, {s.microbatches} microbatches"
        print(f"{title}; bubble {simulate(s).bubble:.1%} of the work\n{table(s.rows)}")
    return launch.DONE


def alike(shown: list[str], printed: list[str]) -> bool:
    """Return True if lines are shown as printed, where `...` stands for any of them."""
    parts = [r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in shown]
    return bool(re.fullmatch("".join(parts), "".join(line + "\n" for line in printed)))


def answers(status: int, typed: Typed, bench: Bench) -> None:
    """Check status and output of a command of ours against what is shown: a refusal, its output, or nothing."""
    out, error = (text.splitlines() for text in bench.capfd.readouterr())
    refused = any(line.startswith("config: ") for line in typed.shown)
    assert error == (list(typed.shown) if refused else [])
    assert status == (launch.REFUSED if refused else launch.DONE)
    shown = list(takewhile(lambda line: not FROM_WORKERS.match(line), typed.shown))
    if shown and not refused:
        assert alike([*shown, *["..."] * (len(shown) < len(typed.shown))], out), "\n".join(out)


def launches(typed: Typed, arguments: str, bench: Bench) -> None:
    if "model.source=mine/hf" in arguments:
        exported(bench)
        own_words("mine/hf/tokenizer.json")
    if "train.teacher=teacher" in arguments:  # which the command before it trains
        bench.monkeypatch.setattr(launch, "_violations_of_teacher", lambda config: [])
    if "data.path=pages-train.bin" in arguments:
        prepares(typed, next(t.command for t in COMMANDS if " convert megatron pages" in t.command)[24:], bench)
    answers(launch.main(shlex.split(arguments)), typed, bench)


def plans(typed: Typed, arguments: str, bench: Bench) -> None:
    bench.monkeypatch.setattr(calibration_run, "run_calibration", lambda *_: "# what workers measure\n")
    bench.monkeypatch.setattr("sys.argv", ["platform.plan", *shlex.split(arguments)])
    answers(explain_plan(), typed, bench)


def examines(typed: Typed, arguments: str, bench: Bench) -> None:
    """Run a command of the doctor up to where it would start workers."""
    seen = []
    bench.monkeypatch.setattr(
        doctor, "_examine_workers", lambda config, plan, *_: seen.append(plan) or doctor.DoctorReport([], {})
    )
    assert doctor.main(shlex.split(arguments)) == doctor.SOUND and seen
    assert all(line in bench.capfd.readouterr().out for line in typed.shown)


def tunes(typed: Typed, arguments: str, bench: Bench) -> None:
    """Choose how a model is tuned, and launch that; a run in whose place a page names one of its reader's is kept."""
    if "mine/run pairs.jsonl" in arguments:
        exported(bench)
        own_words("words.json")
        [kept] = (ROOT / "tests").glob("commands/kept_runs/*/run")
        shutil.copytree(kept, "mine/run")
        shutil.copy(ROOT / "examples" / "pairs.jsonl", "pairs.jsonl")
        arguments += " data.tokenizer=words.json cluster.device=cpu"
    answers(tune.main(shlex.split(arguments)), typed, bench)


def inspects(typed: Typed, arguments: str, bench: Bench) -> None:
    """Run a command on kept checkpoints, and compare but for the numbers and names that other runs give them."""
    [kept, *_] = (ROOT / "tests").rglob("kept_runs/*/run/checkpoints")
    shutil.copytree(kept, "mine/checkpoints")
    status = inspect_checkpoint(shlex.split(arguments))
    out, _ = bench.capfd.readouterr()
    assert status == launch.DONE
    if typed.shown:
        assert alike([neutral(line) for line in typed.shown], [neutral(line) for line in out.splitlines()]), out


def exported(bench: Bench) -> None:
    """Export the kept checkpoints of a run to the folder that the pages name."""
    [kept, *_] = (ROOT / "tests").rglob("kept_runs/*/run/checkpoints")
    shutil.copytree(kept, "mine/checkpoints")
    assert convert_weights(["export", "mine/checkpoints", "mine/hf"]) == launch.DONE
    bench.capfd.readouterr()


def writes_pythia(bench: Bench) -> None:
    """Write a small model of the family that a page registers to the folder that it names."""
    family = importlib.import_module("own_family").GPT_NEOX
    bench.monkeypatch.setitem(families.FAMILIES, family.name, family)
    config = {"model_type": "gpt_neox", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 256}
    model = Model(**translate_config_json(config, ["lm_head.weight"]))
    shapes = {tensor.name: tensor.shape for tensor in list_stored_tensors(model, family)}
    write_weights(bench.folder / "mine" / "pythia", config, shapes)


def trains_adapters(bench: Bench) -> None:
    """Train adapters of a small model for a step, under the names of a page."""
    base = written(bench.folder / "Qwen3-8B", "llama", tensors_of("llama"))
    keys = "model=from_hf data=synthetic tune=lora tensor=serial parallel.data=1 train.steps=2 optimizer.warmup_steps=1"
    more = "cluster=inline train.global_batch=4 train.microbatch=2 eval.every=0 run.dir=mine/run"
    with bench.monkeypatch.context() as whole:
        whole.setattr(driver, "drive_run", DRIVE_RUN)
        done = in_this_process(QUICK, *keys.split(), *more.split(), f"model.source={base}", cwd=bench.folder)
    assert done.returncode == launch.DONE, done.stderr


def converts(typed: Typed, arguments: str, bench: Bench) -> None:
    """Run a command on weights that a kept run has trained, or that a page's own family has imported."""
    if typed.file == "own-families.md" and " export " in arguments:
        words = "--extend own_family import mine/pythia mine/checkpoints"
        assert convert_weights(words.split()) == launch.DONE
    elif typed.file == "tuning.md":
        trains_adapters(bench)
        if arguments.startswith("import mine/adapters"):
            assert convert_weights(["export", "mine/run", "mine/adapters", "--adapters"]) == launch.DONE
    else:
        exported(bench)
    if arguments.startswith("export mine/checkpoints mine/hf"):
        shutil.rmtree("mine/hf")
    refused = any(line.startswith("weights: ") for line in typed.shown)
    assert convert_weights(shlex.split(arguments)) == (launch.REFUSED if refused else launch.DONE)
    assert not refused or bench.capfd.readouterr().err.splitlines() == list(typed.shown)


def neutral(line: str) -> str:
    return re.sub(r"\b[0-9a-f]*\d[\w.,+]*\b", "N", line).replace("  ", " ")


def prepares(typed: Typed, arguments: str, bench: Bench) -> None:
    """Run a command on data, with a cache of its own, or on the data of a kept run."""
    bench.monkeypatch.setenv("XDG_CACHE_HOME", str(bench.folder / "cache"))
    if "runs/demo" in arguments:
        [kept] = (ROOT / "tests").glob("commands/kept_runs/*/run")
        shutil.copytree(kept, "runs/demo")
        arguments = arguments.replace("step=22", "step=8")  # its last one
    assert prepare_data(shlex.split(arguments)) == launch.DONE
    bench.capfd.readouterr()


def asks(typed: Typed, arguments: str, bench: Bench) -> None:
    """Let the model of a kept run write, under any plan, in ranks of this machine."""
    asked(write_answers, typed, arguments, bench)


def measures(typed: Typed, arguments: str, bench: Bench) -> None:
    """Measure the model of a kept run."""
    asked(measure, typed, arguments, bench)


def own_words(path: str) -> None:
    """Write a tokenizer of four entries."""
    words = Tokenizer(BPE({"d": 0, "e": 1, "f": 2, "<|endoftext|>": 3}, [], unk_token="<|endoftext|>"))
    words.add_special_tokens(["<|endoftext|>"])
    words.save(path)


def asked(command: Callable[..., int], typed: Typed, arguments: str, bench: Bench) -> None:
    """Run a command on a kept run, whose model has a tokenizer put beside it, as it has been trained on random
    tokens."""
    exported(bench)
    [kept] = (ROOT / "tests").glob("commands/kept_runs/*/run")
    for name in ("mine/run", "runs/gpt_quick"):
        shutil.copytree(kept, name)
    own_words("words.json")
    Path("chat.jinja").write_text("{{ messages[0].content[:3] }}")  # what fits the kept run
    more = ["data.tokenizer=words.json"] if command is write_answers else []
    more += ["data.chat_template=chat.jinja"] if "--chat" in arguments else []
    refused = any(line.startswith("generate: ") for line in typed.shown)
    assert command([*shlex.split(arguments), *more]) == (launch.REFUSED if refused else launch.DONE)
    out, error = bench.capfd.readouterr()
    assert error.splitlines() == list(typed.shown) if refused else out or "--out" in arguments


def is_a_target(typed: Typed, arguments: str, bench: Bench) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(arguments.split()) <= set(targets)


def is_shown(typed: Typed, arguments: str, bench: Bench) -> None:
    assert (bench.folder / arguments).read_text().splitlines() == list(typed.shown)


def is_ray_s(typed: Typed, arguments: str, bench: Bench) -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    name, *options = shlex.split(arguments)
    scripts.cli.commands[name].make_context(name, options)


def starts_processes(typed: Typed, arguments: str, bench: Bench) -> None:
    options, _, rest = arguments.partition(" -m platform.launch ")
    assert re.fullmatch(r"--nproc-per-node \d+|--standalone --nproc-per-node \d+", options)
    launches(typed, rest, bench)


def writes_a_job(typed: Typed, arguments: str, bench: Bench) -> None:
    """Write a job, and read it back: bash takes a script, YAML a manifest."""
    words = shlex.split(arguments)
    answers(write_job(words), typed, bench)
    for name in (words[i + 1] for i, word in enumerate(words) if word == "--output"):
        if words[0] == "slurm":
            subprocess.run(["bash", "-n", name], check=True)
        else:
            assert len(list(yaml.safe_load_all(Path(name).read_text()))) > 1


def tells_of_a_job(typed: Typed, arguments: str, bench: Bench) -> None:
    """Tell of a kept run, in whose place a page names a directory of its own, with a log of a node."""
    [kept] = (ROOT / "tests").glob("commands/kept_runs/*/run")
    shutil.copytree(kept, "mine/run")
    Path("mine/run/logs").mkdir(exist_ok=True)
    Path("mine/run/logs/node-a.log").write_text("raylet died\n")
    name, _, *more = shlex.split(arguments)
    assert write_job([name, "mine/run", *more]) == launch.DONE
    assert ("state: " if name == "status" else "raylet died") in bench.capfd.readouterr().out


def looks_at_a_run(typed: Typed, arguments: str, bench: Bench) -> None:
    """Look at a kept run, as a page does at one of its reader's."""
    [kept] = (ROOT / "tests").glob("commands/kept_runs/*/run")
    shutil.copytree(kept, "mine/run")
    assert tell_status(shlex.split(arguments)) == launch.DONE
    assert bench.capfd.readouterr().out.startswith("run ")


def reports(typed: Typed, arguments: str, bench: Bench) -> None:
    """Write the page of a kept run, in whose place a page names directories of its own; nothing is served."""
    [kept] = (ROOT / "tests").glob("commands/kept_runs/*/run")
    for name in (word for word in shlex.split(arguments) if word.startswith(("runs/", "mine/"))):
        shutil.copytree(kept, name)
    token = "".join(re.findall(r"/([\w-]{22})/", "".join(typed.shown)))  # another one each time
    served_at = lambda self, host, port, page: setattr(self, "address", f"{host}:{port}/{token}")  # noqa: E731
    at = type("Address", (), {"__init__": served_at})
    bench.monkeypatch.setattr("platform.report.page_server.PageServer", at)
    bench.monkeypatch.setattr("platform.report.page_server.serve_page", lambda server: None)
    assert write_page(shlex.split(arguments)) == launch.DONE
    out = re.sub(r"\d\.\d\d MB", "0.11 MB", bench.capfd.readouterr().out)
    assert not typed.shown or out.splitlines() == list(typed.shown)


def sends(typed: Typed, arguments: str, bench: Bench) -> None:
    """Send a kept run, in whose place a page names one of its own, to services whose packages are there."""
    directory, *services = shlex.split(arguments)
    for name in services:
        pytest.importorskip(name, reason=f"pip install {name}")
    [kept] = (ROOT / "tests").glob("commands/kept_runs/*/run")
    shutil.copytree(kept, directory)
    assert send_run([directory, *services]) == launch.DONE
    out = bench.capfd.readouterr().out.replace(f"{bench.folder}/", "")
    assert out.splitlines() == list(typed.shown)


def writers() -> dict[str, list[str]]:
    """Return the files that commands of the pages write as jobs, each with the words of its command."""
    words_by_file = {}
    for typed in COMMANDS:
        words = shlex.split(typed.command) if typed.command.startswith("python -m platform.jobs ") else []
        words_by_file |= {words[i + 1]: words[3:i] for i, word in enumerate(words) if word == "--output"}
    return words_by_file


def submits(typed: Typed, arguments: str, bench: Bench) -> None:
    """Accept the submission of a script that a page writes, with what is typed after its name."""
    script, *more = shlex.split(arguments)
    words = [word for word in writers()[script] if not word.startswith("job.")]
    launch.compose_config([*words[1:], "cluster=ray", *more])


def applies(typed: Typed, arguments: str, bench: Bench) -> None:
    how, path = arguments.split()
    where = ROOT / path
    assert where in JOBS or path in writers() if how == "-f" else where / "kustomization.yaml" in JOBS


def builds(typed: Typed, arguments: str, bench: Bench) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert all(f"FROM base AS torch-{device}" in dockerfile for device in re.findall(r"DEVICE=(\w+)", arguments))


def names_files(typed: Typed, arguments: str, bench: Bench) -> None:
    paths = [word for word in shlex.split(arguments) if word.partition("/")[0] in FOLDERS]
    assert paths and all((ROOT / path).exists() for path in paths)


def names_a_module(typed: Typed, arguments: str, bench: Bench) -> None:
    """Accept a module of tests that runs a command of ours, which is composed."""
    module, _, rest = arguments.partition(" ")
    assert (ROOT / f"{module.replace('.', '/')}.py").exists()
    launches(typed, rest, bench)


def has_options(typed: Typed, arguments: str, bench: Bench) -> None:
    """Accept a benchmark that is there and has the options."""
    name, *options = shlex.split(arguments)
    text = (ROOT / (name if "/" in name else f"{name.replace('.', '/')}.py")).read_text()
    assert all(f'"{option}"' in text for option in options if option.startswith("--"))


def is_generated(typed: Typed, arguments: str, bench: Bench) -> None:
    """Accept a command whose output `tests.docs.one_rule` writes into its page and compares with it."""
    assert typed.file == "one-rule.md"


def is_trusted(typed: Typed, arguments: str, bench: Bench) -> None:
    """Accept a command that sets up a machine; its whole text stands in KINDS."""


KINDS: dict[str, Callable[..., None]] = {  # what a command looks like -> the check of it and of its arguments
    r"python -m platform\.launch (.*)": launches,
    r"python -m platform\.tune (.*)": tunes,
    r"(?:[A-Z_]+=\w+|nsys profile --output step) python -m platform\.launch (.*)": launches,
    r"python -m (tests\.harness\..*)": names_a_module,
    r"python -m platform\.plan ([^|]*)": plans,
    r"python -m platform\.plan ([^|]* \| grep .*)": is_generated,
    r"python -m platform\.checkpoint (.*)": inspects,
    r"python -m platform\.doctor (.*)": examines,
    r"python -m platform\.data (.*)": prepares,
    r"ray job submit --working-dir \. -- python -m platform\.launch (.*)": launches,
    r"python -m platform\.weights (.*)": converts,
    r"python -m platform\.generate (.*)": asks,
    r"python -m platform\.evaluate (.*)": measures,
    r"torchrun (.*)": starts_processes,
    r"make (.*)": is_a_target,
    r"cat (.*)": is_shown,
    r"ray ((?!job ).*)": is_ray_s,
    r"python -m platform\.jobs ((?:kubernetes|slurm) .*)": writes_a_job,
    r"python -m platform\.jobs ((?:status|logs) .*)": tells_of_a_job,
    r"python -m platform\.status (.*)": looks_at_a_run,
    r"python -m platform\.report (.*)": reports,
    r"python -m platform\.monitor\.sinks (.*)": sends,
    r"sbatch (.*)": submits,
    r"kubectl apply (-[fk] .*)": applies,
    r"docker build -t elastic-platform:0\.1\.0 (.*)\.": builds,
    r"(kubectl (?:get|delete) (?:ray)?job \w+|kubectl logs -f (?:job/\w+|-l [\w./=,-]+))": is_trusted,
    r"(kind create cluster|kind load docker-image elastic-platform:0\.1\.0)": is_trusted,
    r"(helm install kuberay-operator kuberay-operator --repo \S+ --version 1\.6\.2)": is_trusted,
    r"python -m pytest (.*)": names_files,
    r"python (?:-m )?(benchmarks[/.].*)": has_options,
    r"python ((?:docs|dashboards|tests/|examples)/.*)": names_files,
    r"(hf download Qwen/Qwen3-8B --local-dir Qwen3-8B)": is_trusted,
    r"(source \.venv/bin/activate|pip install -e \.|pip install torch==2\.13\.0|git clone .*|cd .*)": is_trusted,
}


@pytest.mark.parametrize("typed", COMMANDS, ids=lambda typed: f"{typed.file}: {typed.command}")
def test_a_command_does_what_is_shown(typed: Typed, bench: Bench):
    known = [(check, match[1]) for form, check in KINDS.items() if (match := re.fullmatch(form, typed.command))]
    assert len(known) == 1, f"{typed.command}: say in KINDS how to test it"
    [(check, arguments)] = known
    if typed.file in ("first-gpu-day.md", "recipes.md"):
        bench.monkeypatch.setattr(resources, "gpu_count", lambda: 8)
    if typed.file == "own-families.md":
        bench.monkeypatch.syspath_prepend(ROOT / "examples")  # PYTHONPATH=examples, as the page says
        writes_pythia(bench)
    if "qwen3_8b" in arguments or "my.jsonl" in arguments and "Qwen3-8B" in arguments:
        write_model(bench.folder / "Qwen3-8B")
        [record] = [text for language, text in blocks(ROOT / "docs" / "fine-tune.md") if language == "text"]
        write_talks(bench.folder / "my.jsonl", record.strip())
        bench.monkeypatch.setenv("XDG_CACHE_HOME", str(bench.folder / "cache"))
    check(typed, arguments, bench)


def test_there_are_commands():
    trained = [typed for typed in COMMANDS if typed.command.startswith(LAUNCH)]
    assert len(trained) > 20 and sum("-m platform.plan" in typed.command for typed in COMMANDS) >= 2
    assert sum(any(line.startswith("config: ") for line in typed.shown) for typed in trained) >= 4
    assert {typed.file for typed in trained} >= {"README.md", "clusters.md"}


@pytest.mark.parametrize("shown", [["a"], ["a", "b", "c"], ["...", "a"], ["b", "..."]])
def test_what_is_not_printed_is_seen(shown: list[str]):
    assert alike(["a", "..."], ["a", "b"]) and alike(["...", "b"], ["a", "b"]) and not alike(shown, ["a", "b"])
