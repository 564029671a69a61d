"""No secret leaves the process: not to any file of the run directory, not to the screen, not in a refusal."""

from __future__ import annotations

import json
import os
import random
import string
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

from platform.cluster import driver
from platform.config.identity import run_identity
from platform.launch import compose_config, main
from platform.monitor import JsonLines
from tests.harness.commands import QUICK, in_this_process

TINY = [
    *(QUICK, "data=synthetic", "cluster=inline", "tensor=serial", "parallel.data=1", "model.layers=1"),
    *("model.d_model=8", "model.heads=2", "model.length=8", "model.vocab=32", "train.global_batch=2"),
    *("train.microbatch=2", "optimizer.warmup_steps=1", "eval.every=0", "monitor.sample=0", "train.steps=2"),
    "checkpoint.every=1",
]
NASTY = "/@:?#% &=+'\"\\"


def secret(draw: random.Random, nasty: str = NASTY) -> str:
    """Letters and what makes URLs hard to read, with a letter at either end."""
    inner = "".join(draw.choices(string.ascii_letters + string.digits + 3 * nasty, k=draw.randint(10, 18)))
    return f"{draw.choice(string.ascii_letters)}{inner}{draw.choice(string.ascii_letters)}"


def hints(value: str) -> set[str]:
    """The secret as sinks write it, and every stretch of it that a wrong cut would leave."""
    pieces = {value[i : i + 8] for i in range(len(value) - 7)}
    return {form for piece in pieces for form in (piece, json.dumps(piece)[1:-1], quote(piece, safe=""))}


def leaks(value: str, text: str, folder: Path | None = None) -> list[str]:
    """Where the secret, or a stretch of it, can be read."""
    files = [path for path in folder.rglob("*") if path.is_file()] if folder else []
    contents = {"output": text.encode()} | {str(path): path.read_bytes() for path in files}
    return [where for where, content in contents.items() if any(h.encode() in content for h in hints(value))]


@pytest.fixture
def environment(monkeypatch):
    """Sets secrets in the environment: name -> value."""

    def put(seed: int, *names: str) -> dict[str, str]:
        draw = random.Random(seed)
        secrets = {name: secret(draw, "@:?#% &=+") for name in names}
        for name, value in secrets.items():
            monkeypatch.setenv(name, value)
        return secrets

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return put


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_no_byte_of_a_run_and_of_its_output_tells_a_secret(tmp_path, environment, monkeypatch, seed):
    known = environment(seed, "TYPED", "OWN_FILE", "DECODED", "FIELD")
    draw = random.Random(-seed - 1)
    known |= {name: secret(draw, NASTY) for name in ("user", "password", "signature")}
    url = f"memory://{known['user']}:{known['password']}@store{seed}/a?X-Amz-Signature={quote(known['signature'])}"
    own = tmp_path / "own" / "monitor"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text('kind: wandb\nproject: "p"\n')
    (own.parent / "data").mkdir()
    (own.parent / "data" / "secretly.yaml").write_text('kind: synthetic\ntarget_path: "x-${oc.env:OWN_FILE}-y"\n')
    typed = [a for a in TINY if a != "data=synthetic"]
    arguments = [
        *("--config-dir", str(own.parent), *typed, "monitor=mine", "data=secretly", "run.dir=run"),
        *("data.cache=/nowhere/${oc.env:TYPED}", 'data.target_field="${oc.decode:${oc.env:DECODED}}"'),
        *("data.field=${oc.env:FIELD}", "checkpoint.url='" + url.replace("\\", "\\\\").replace("'", "\\'") + "'"),
    ]
    os.environ["DECODED"] = repr(known["DECODED"])
    monkeypatch.setattr(sys, "argv", ["launch", *arguments, "train.stop_at=1"])  # as by command: W&B looks there
    first = in_this_process(cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    second = in_this_process(*arguments, cwd=tmp_path)
    assert second.returncode == 0 and "continues after step 1" in second.stdout, second.stdout + second.stderr
    assert "changed  checkpoint" not in second.stdout and "changed  data" not in second.stdout
    said = first.stdout + first.stderr + second.stdout + second.stderr
    for name, value in known.items():
        assert not leaks(value, said, tmp_path / "run"), name
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert kept["data"]["target_path"].endswith("/x-${oc.env:OWN_FILE}-y"), "what was typed says where it comes from"


REFUSED = [
    "checkpoint.url=nosuch://user:{0}@host/x",
    "checkpoint.url=s3://host/x?token={0}",
    "checkpoint.resume=memory://user:{0}@store/x",
    "checkpoint.resume=memory://store/x?sig={0}&key={0}",
    "checkpoint.urll=s3://user:{0}@host/x",
    "train.steps=https://user:{0}@host/x",
    "precision=https://host/x?password={0}",
    "data.path=https://user:{0}@host/x.txt",
    "extend=[https://user:{0}@host]",
    "pipeline.file=s3://user:{0}@host/table",
    "model=s3://user:{0}@host/table",
    "s3://user:{0}@host/table",
    "tensor.layout=s3://user:{0}@host/table",
    "precision=${{oc.env:A_SECRET}}",
    "train.steps=${{oc.env:A_SECRET}}",
    "extend=[${{oc.env:A_SECRET}}]",
    "elastic.faults=[${{oc.env:A_SECRET}}]",
    "run.time_limit=${{oc.env:A_SECRET}}",
    "resume.allow=[${{oc.env:A_SECRET}}]",
    "checkpoint.resume=memory://${{oc.env:A_SECRET}}",
    "tensor.layout=${{oc.env:A_SECRET}}",
]


def test_no_refusal_tells_a_secret(tmp_path, environment):
    leaky = []
    for number, line in enumerate(REFUSED):
        value = environment(number, "A_SECRET")["A_SECRET"].replace(" ", "")
        os.environ["A_SECRET"] = value
        words = [line.format(value), *(["data=text"] if line.startswith("data.path") else [])]
        done = in_this_process(QUICK, *words, "run.dir=run", cwd=tmp_path)
        assert done.returncode == 2, (line, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        leaky += [line] if leaks(value, done.stdout + done.stderr) else []
    assert not leaky


def test_the_shown_configuration_has_no_secret(tmp_path, environment):
    value = environment(1, "A_SECRET")["A_SECRET"]
    typed = ["data.target_path=${oc.env:A_SECRET}", "checkpoint.url=s3://user:pass-word@host/x?token=to-ken-ken"]
    for how in (["--cfg", "job"], ["--cfg", "all"], ["--info", "config"]):
        done = in_this_process(*TINY, *typed, "run.dir=run", *how, cwd=tmp_path)
        assert done.returncode == 0
        for one in (value, "pass-word", "to-ken-ken"):
            assert not leaks(one, done.stdout + done.stderr), how
    assert "data.target_path" in done.stdout or "target_path: ${oc.env:A_SECRET}" in done.stdout


def test_the_default_directory_tells_nothing_of_a_secret_and_is_stable(tmp_path, environment, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = "checkpoint.url=memory://user:{}@store/x"
    names = set()
    for seed in range(3):
        environment(seed, "A_SECRET")
        typed = ["data.target_path=${oc.env:A_SECRET}", url.format(f"password{seed}")]
        names.add(compose_config([*TINY, *typed]).run.dir)
    assert len(names) == 1, "whoever knows the rest could try passwords against the name"
    assert compose_config([*TINY, typed[0], "checkpoint.url=memory://store/other"]).run.dir not in names


def test_a_job_of_a_sweep_is_the_run_of_the_same_command_alone(tmp_path, monkeypatch):
    """Also where an earlier job reads as a secret what a later one types plainly."""
    monkeypatch.chdir(tmp_path)
    value = "plain" + "7" * 12
    monkeypatch.setenv("A_SECRET", value)
    ran = []
    monkeypatch.setattr(
        driver, "drive_run", lambda config, plan, **_: ran.append((config.run.dir, run_identity(config))) or 0
    )
    plain = f"data.target_path=/{value}"
    assert main(["-m", *TINY, "data.target_path=/${oc.env:A_SECRET}," + plain.partition("=")[2]]) == 0
    assert main([*TINY, plain]) == 0
    first, second, alone = ran
    assert second == alone and first[0] != second[0] and value not in str(first)


def test_a_directory_that_keeps_the_resolved_value_is_the_same_run(tmp_path, environment, monkeypatch):
    """As earlier versions wrote it."""
    monkeypatch.setenv("SCRATCH_OF_MINE", str(tmp_path / "scratch"))
    literal = f"data.target_path={tmp_path / 'scratch'}/corpus"
    assert in_this_process(*TINY, literal, "run.dir=run", "train.stop_at=1", cwd=tmp_path).returncode == 0
    by_name = "data.target_path=${oc.env:SCRATCH_OF_MINE}/corpus"
    done = in_this_process(*TINY, by_name, "run.dir=run", cwd=tmp_path)
    assert done.returncode == 0 and "changed  data" not in done.stdout, done.stdout + done.stderr


def test_the_same_command_finds_the_run_that_an_earlier_version_named(tmp_path):
    first = in_this_process(*TINY, "train.stop_at=1", cwd=tmp_path)
    assert first.returncode == 0
    [run] = (tmp_path / "runs").iterdir()
    kept = yaml.safe_load((run / "config.yaml").read_text())
    del kept["elastic"]["replace_slow"], kept["train"]["spike"]  # as if these came later
    (run / "config.yaml").write_text(yaml.safe_dump(kept))
    run.rename(run.with_name("gpt_quick-0123456789ab"))
    other = in_this_process(*TINY, "seed=1", "train.stop_at=1", cwd=tmp_path)
    assert other.returncode == 0 and "continues after" not in other.stdout
    second = in_this_process(*TINY, cwd=tmp_path)
    assert second.returncode == 0 and "continues after step 1" in second.stdout, second.stdout + second.stderr
    steps = [e["event"] for e in JsonLines.read_objects(tmp_path / "runs" / "gpt_quick-0123456789ab" / "journal.jsonl")]
    assert steps.count("done") == 2
