"""`python -m platform.doctor` as users type it: on real workers, one of them sick, and on mistakes."""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest

from platform.monitor import JsonLines
from tests.harness import warm
from tests.harness.commands import QUICK, SMALL, TIMEOUT

SICK = "extend=[tests.doubles.sick_worker]"


def doctor(*arguments, cwd, **environment):
    with mock.patch.dict(os.environ, environment):
        return warm.run_module("platform.doctor", *arguments, cwd=cwd, timeout=TIMEOUT)


def test_a_sick_worker_is_named_in_text_and_nothing_is_left_behind(tmp_path):
    sick = {"SICK": "1:products 2:clock", "SICK_BY_EXTENSION": "1"}
    spare = "cluster.doctor=quick elastic.spares=1 cluster=processes run.dir=run".split()
    done = doctor(QUICK, *SMALL, *spare, SICK, cwd=tmp_path, **sick)
    assert done.returncode == 1, done.stdout + done.stderr
    table = {line.split()[1]: line for line in done.stdout.splitlines() if "GFLOP/s" in line and "bad" not in line}
    assert sorted(table) == ["0", "1", "2", "3", "4"]
    assert table["0"].endswith("sound") and table["4"].startswith("spare") and table["4"].endswith("sound")
    assert table["1"].endswith("BAD: gemm") and table["2"].endswith("BAD: clock")
    bad = [line for line in done.stdout.splitlines() if line.startswith("bad: ")]
    assert len(bad) == 2 and bad[0].startswith(f"bad: worker 1 on {os.uname().nodename}: gemm: ")
    assert "where its peers have" in bad[0] and bad[1].endswith(
        "(look at: time synchronisation of that node (chrony, ntpd))"
    )
    assert not [*tmp_path.iterdir()]


@pytest.mark.full
def test_sound_workers_in_full_as_json(tmp_path):
    done = doctor(QUICK, *SMALL, "cluster=processes", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["status"], report["bad_nodes"], report["shared"]) == (0, [], {})
    assert [(w["rank"], w["bad"]) for w in report["workers"]] == [(rank, {}) for rank in range(4)]
    assert all("link" in w["findings"]["readings"] for w in report["workers"])
    assert "examining 4 workers" in done.stderr and not [*tmp_path.iterdir()]


@pytest.mark.full
def test_a_run_leaves_a_sick_worker_out_and_trains_with_the_spare(tmp_path):
    run = "cluster.doctor=full elastic.spares=1 cluster=processes run.dir=run train.steps=4 optimizer.warmup_steps=0"
    sick = {**os.environ, "SICK": "2:wrong", "SICK_BY_EXTENSION": "1"}
    line = [sys.executable, "-m", "platform.launch", QUICK, *SMALL, *run.split(), SICK]
    done = subprocess.run(line, cwd=tmp_path, env=sick, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    journal = [*JsonLines.read_objects(tmp_path / "run" / "journal.jsonl")]
    [examined] = [event for event in journal if event["event"] == "examined"]
    assert examined["unsound"] == [2] and "wrong: " in examined["reasons"][0]
    [formed] = [event for event in journal if event["event"] == "formed"]
    assert sorted(w["number"] for w in formed["workers"]) == [0, 1, 3, 4]
    assert "it gets no seat" in done.stdout


@pytest.mark.full
def test_under_torchrun(tmp_path):
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "platform.doctor"]
    two = "parallel.data=1 tensor=1d tensor.axes.t=2 cluster.doctor=quick run.dir=run".split()
    done = subprocess.run([*line, QUICK, *SMALL, *two], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers, all sound" in done.stdout and not [*tmp_path.iterdir()]


def in_process(capsys, *arguments):
    from platform.doctor import main

    status = main([*arguments])
    return status, capsys.readouterr()


def test_mistakes_are_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrong = ["tensor=3d", "cluster.doctor=maybe", "train.stepz=3"]
    status, said = in_process(capsys, QUICK, *wrong)
    assert status == 2 and not said.out and not [*tmp_path.iterdir()]
    assert "config: cluster.doctor=maybe: must be one of" in said.err or "cluster.doctor=maybe" in said.err
    assert "train.stepz" in said.err and all(line.startswith("config: ") for line in said.err.splitlines())


def test_too_few_places_are_a_mistake_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, said = in_process(capsys, QUICK, "cluster.device=cuda", "cluster=processes")
    assert status == 2 and "needs 4 GPUs" in said.err and not [*tmp_path.iterdir()]
