"""The command line, other formats, and checkpoints of earlier versions."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from platform.boundary.storage import open_storage
from platform.checkpoint.__main__ import main
from platform.checkpoint.catalogue import find_newest_checkpoint, load_manifest
from platform.checkpoint.moves import read_tensor
from platform.checkpoint.saver import CheckpointSaver
from tests.harness.storage_job import META, Job, meta, values

SHAPES = {"model.a": (6, 4), "model.b": (5,), "exp_avg.a": (6, 4), "count": ()}
FORMAT_2 = Path(__file__).parent / "format_2"


@pytest.fixture
def saved(tmp_path):
    storage = open_storage(str(tmp_path / "run"))
    Job.whole(values(SHAPES, 4), 2).save(storage, 4)
    return storage


def damage(storage, directory: str) -> None:
    file = storage.root / directory / "blocks-00000.bin"
    file.write_bytes(b"\x01" + file.read_bytes()[1:])


def test_verify(saved, capsys):
    [directory] = saved.list_sizes("")
    assert main(["verify", saved.url]) == main(["verify", f"{saved.url}/{directory}/"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{directory}: good, 4 tensors, 268 bytes"] * 2
    worse = Job.whole(values(SHAPES, 5)).save(saved, 5)
    damage(saved, worse)
    assert main(["verify", saved.url]) == 1
    bad, good = capsys.readouterr().out.splitlines()
    assert bad.startswith(f"{worse}: blocks-00000.bin: bytes 0 to ") and "good" in good
    assert "BAD.txt" not in saved.list_sizes(worse)  # looking changes nothing


def test_show(saved, capsys):
    assert main(["show", saved.url]) == 0
    text = capsys.readouterr().out
    for part in ("step           4\n", "t=2", "model.a", "float64", "6 x 4", "scalar", "268 bytes in 2 files"):
        assert part in text
    assert main(["show", "--json", saved.url]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step"] == 4 and printed["tensors"]["model.a"]["shape"] == [6, 4]


@pytest.mark.parametrize("url", ["nothing", "nothing/step-00000001-000001-abcdef"])
@pytest.mark.parametrize("command", ["verify", "show", "export"])
def test_nothing_there(tmp_path, capsys, command, url):
    target = [str(tmp_path / "out")] if command == "export" else []
    assert main([command, str(tmp_path / url), *target]) == 1
    out = "".join(capsys.readouterr())
    assert len(out.splitlines()) == 1 and ("holds no checkpoint" in out or "not a checkpoint" in out)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_there_and_back(saved, tmp_path, capsys, form):
    target, back = str(tmp_path / "exported"), str(tmp_path / "back")
    assert main(["export", saved.url, target, "--format", form]) == 0
    assert main(["export", saved.url, target, "--format", form]) == 1
    assert capsys.readouterr().err == f"checkpoint: {target} exists; name another target\n"
    assert main(["import", target, back, "--format", form]) == 0
    storage = open_storage(back)
    newest = find_newest_checkpoint(storage)
    assert newest.manifest.meta == type(META)(**{**vars(meta(4)), "plan": {}})
    job = Job.whole(values(SHAPES, 4), 3)
    job.check(job.restore(storage, newest.directory, newest.manifest))
    assert newest.manifest.tensors.keys() == SHAPES.keys()


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_a_part_is_exported(saved, tmp_path, capsys, form):
    target = tmp_path / "weights"
    assert main(["export", saved.url, str(target), "--format", form, "--only", "model."]) == 0
    assert main(["export", saved.url, str(tmp_path / "none"), "--format", form, "--only", "models."]) == 2
    assert (
        "--only=models.: begins no name; nearest legal: model." in capsys.readouterr().err
        and not (tmp_path / "none").exists()
    )
    expected = {n: t for n, t in values(SHAPES, 4).items() if n.startswith("model.")}
    if form == "dcp":
        state = {n: torch.zeros_like(t) for n, t in expected.items()}
        dcp.load(state, checkpoint_id=target, no_dist=True)
    else:
        state = safetensors.torch.load_file(target)
    assert state.keys() == expected.keys() and all(torch.equal(state[n], t) for n, t in expected.items())


def test_a_file_of_the_safetensors_library(tmp_path):
    tensors = values(SHAPES, 1)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    assert main(["import", str(tmp_path / "model.safetensors"), str(tmp_path / "run")]) == 0
    storage = open_storage(str(tmp_path / "run"))
    newest = find_newest_checkpoint(storage)
    assert newest.manifest.meta.step == 0
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(storage, newest.directory, newest.manifest, name), tensor)


@pytest.mark.parametrize("content", [b"", b"\xff" * 99, (2).to_bytes(8, "little") + b"[]", b"{}" * 40])
def test_what_is_no_safetensors_file_is_refused(tmp_path, capsys, content):
    (tmp_path / "file").write_bytes(content)
    assert main(["import", str(tmp_path / "file"), str(tmp_path / "run")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "does not hold safetensors" in line
    assert find_newest_checkpoint(open_storage(str(tmp_path / "run"))).directory is None


def test_the_command_line_runs(saved, root):
    command = [sys.executable, "-m", "platform.checkpoint", "verify", saved.url]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "good" in done.stdout, done.stderr


def test_format_2_is_read_forever():
    """Never write this checkpoint again: later versions must read what an earlier one wrote."""
    storage = open_storage(str(FORMAT_2))
    newest = find_newest_checkpoint(storage)
    assert newest.directory == "step-00000003-000001-f2f2f2" and not newest.refused
    assert newest.manifest.meta == replace(meta(3), format=2)
    assert json.loads((FORMAT_2 / newest.directory / "manifest.json").read_text())["format"] == 2
    job = Job.whole(
        {
            "weight": torch.arange(12, dtype=torch.float32).view(3, 4),
            "shadow": torch.arange(8).to(torch.bfloat16).view(4, 2),
            "moment": torch.arange(5, dtype=torch.float64) / 3,
            "count": torch.tensor(11),
        },
        2,
    )
    job.check(job.restore(storage, newest.directory, newest.manifest))


def test_the_saver_waits_for_nobody(tmp_path):
    """Training goes on while the workers write, and one save is under way at most."""
    release, job = threading.Event(), Job.whole(values(SHAPES, 1))

    def write(directory):
        assert release.wait(30)
        return job.write(storage, directory)

    storage = open_storage(str(tmp_path))
    saver = CheckpointSaver(storage, last=1)
    saver.start_save(job.shapes, meta(1), write)
    assert saver.is_saving and saver.poll_events() == [] and not saver.wait(0.01)
    with pytest.raises(AssertionError, match="one save at a time"):
        saver.start_save(job.shapes, meta(2), write)
    release.set()
    assert saver.wait(30) and not saver.is_saving
    [event] = saver.poll_events()
    assert event["event"] == "checkpoint" and event["bytes"] == load_manifest(storage, event["directory"]).nbytes
    assert saver.poll_events() == []
    saver.start_save(job.shapes, meta(2), write)
    assert saver.wait(30) and [n[:13] for n in storage.list_sizes("")] == ["step-00000002"]


def test_what_a_worker_raises_is_an_event(tmp_path):
    def write(directory):
        raise RuntimeError("worker 3 is gone\nwith a long story")

    saver = CheckpointSaver(open_storage(str(tmp_path)), tries=2, pause=0)
    saver.start_save({}, meta(1), write)
    assert saver.wait(30)
    assert [e["reason"] for e in saver.poll_events()] == ["RuntimeError: worker 3 is gone"] * 2
