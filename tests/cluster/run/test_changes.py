"""What is other than when the run was last driven."""

import copy
import subprocess

from platform.checkpoint.manifest import Meta
from platform.cluster.origin import find_changed_keys, report_changed_keys, report_code_changes
from platform.config.identity import run_identity
from platform.launch import compose_config
from platform.monitor import Journal, JsonLines, events
from platform.train.environment_proof import describe_git_state, identify_code

QUICK = "+experiment=gpt_quick"
MESH = {"stage": 1, "data": 2, "t": 2}


def between(before, after):
    old, new = compose_config([QUICK, "run.dir=a", *before]), compose_config([QUICK, "run.dir=a", *after])
    return find_changed_keys(old.to_dict(), None, new, MESH)


def test_nothing_changed():
    assert between([], []) == {} == find_changed_keys(None, None, compose_config([QUICK]), MESH)


def test_every_key_by_its_name():
    changed = between(
        ["train.stop_at=3"], ["monitor=wandb", "checkpoint.every=5", "elastic.min_workers=0", "train.steps=7"]
    )
    steps = compose_config([QUICK]).train.steps
    assert changed == {
        "checkpoint.every": (0, 5), "monitor.kind": ("console", "wandb"), "train.steps": (steps, 7),
        "train.stop_at": (3, 0),
    }  # fmt: skip


def test_a_schemes_name_stands_for_its_table():
    changed = between([], ["tensor=3d", "tensor.axes.y=2", "branch=dsp", "branch.axes.g=2"])
    assert changed.keys() == {"tensor.scheme", "tensor.axes.t", "tensor.axes.y", "branch.kind", "branch.axes.g"}
    assert changed["tensor.axes.t"] == (2, None)
    old, new = compose_config([QUICK]), compose_config([QUICK])
    new.tensor.regions = copy.deepcopy(old.tensor.regions) | {"mlp": {"d_ff": ["t"], "length": ["t"]}}
    assert find_changed_keys(old.to_dict(), None, new, MESH) == {
        "tensor.regions.mlp.length": (None, ["t"])
    }  # the file changed


def test_how_it_is_gone_on_is_no_change_and_no_secret_is_shown():
    old, new = compose_config([QUICK]), compose_config([QUICK, "checkpoint.resume=/elsewhere", "run.dir=other"])
    old.checkpoint.url, new.checkpoint.url = "s3://bucket/a", "s3://me:secret@bucket/a"
    new.resume.allow = ["optimizer.lr"]
    assert find_changed_keys(old.to_dict(), None, new, MESH) == {}
    new.checkpoint.url = "s3://me:secret@bucket/b"
    assert find_changed_keys(old.to_dict(), None, new, MESH) == {"checkpoint.url": ("s3://bucket/a", "s3://bucket/b")}


def test_a_checkpoint_from_elsewhere(tmp_path):
    old, new = compose_config([QUICK]), compose_config([QUICK, "optimizer.lr=0.5"])
    plan = {"mesh": {"stage": 1, "data": 4}}
    meta = Meta(1, 16, 0, "c", run_identity(old), "", plan)
    changed = find_changed_keys(None, meta, new, MESH)
    rate = (old.optimizer.lr, 0.5)
    assert changed == {"optimizer.lr": rate, "mesh.data": (4, 2), "mesh.t": (None, 2)}
    journal, said = Journal(tmp_path / "journal.jsonl"), []
    report_changed_keys({}, journal, said.append)
    assert JsonLines.read_objects(tmp_path / "journal.jsonl") == [] == said
    report_changed_keys(changed, journal, said.append)
    (event,) = JsonLines.read_objects(tmp_path / "journal.jsonl")
    assert (event["event"], event["keys"]["mesh.t"]) == ("changed", [None, 2])
    assert said[0] == f"changed  optimizer.lr: {rate[0]} there, 0.5 here" and len(said) == 3


def test_another_version_of_the_code_is_journalled_and_said(tmp_path):
    """Between two drivers of a run; the same one, and a journal of an older version without hashes, say nothing."""
    said, code = [], identify_code(compose_config([QUICK]))
    assert len(code["platform"]) == 12 and {"python", "torch", "ray"} <= code.keys()
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write(events.Starting(world_size=1, cluster="processes", device="cpu"))
    report_code_changes(code, journal, said.append)
    journal.write(events.Starting(world_size=1, cluster="processes", device="cpu", code=code))
    report_code_changes(code, journal, said.append)
    assert said == [] and len(journal.read_events()) == 2
    report_code_changes({**code, "platform": "0123456789ab", "own": "1"}, journal, said.append)
    assert said == [
        f"changed  code of platform: {code['platform']} before, 0123456789ab here",
        "changed  code of own: none before, 1 here",
    ]
    event = JsonLines.read_objects(tmp_path / "journal.jsonl")[-1]
    assert event["event"] == "changed" and event["keys"]["code.platform"] == [code["platform"], "0123456789ab"]


def test_the_commit_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_git_state() == ""
    own = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    (tmp_path / "own.py").write_text("a = 1")
    for command in ("init -q", "add own.py", "commit -q -m x"):
        subprocess.run(["git", *own, *command.split()], check=True)
    clean = describe_git_state()
    (tmp_path / "own.py").write_text("a = 2")
    assert len(clean) == 12 and describe_git_state() == f"{clean}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_git_state() == ""
