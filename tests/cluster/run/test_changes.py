"""What is other than when the run was last driven."""

import copy

from platform.checkpoint.manifest import Meta
from platform.cluster.origin import changes, report, report_code
from platform.config.identity import identity
from platform.launch import compose
from platform.monitor import Journal, JsonLines, events
from platform.train.environment_proof import code_of

QUICK = "+experiment=gpt_quick"
MESH = {"stage": 1, "data": 2, "t": 2}


def between(before, after):
    there, here = compose([QUICK, "run.dir=a", *before]), compose([QUICK, "run.dir=a", *after])
    return changes(there.to_dict(), None, here, MESH)


def test_nothing_changed():
    assert between([], []) == {} == changes(None, None, compose([QUICK]), MESH)


def test_every_key_by_its_name():
    found = between(
        ["train.stop_at=3"], ["monitor=wandb", "checkpoint.every=5", "elastic.min_workers=0", "train.steps=7"]
    )
    steps = compose([QUICK]).train.steps
    assert found == {
        "checkpoint.every": (0, 5), "monitor.kind": ("console", "wandb"), "train.steps": (steps, 7),
        "train.stop_at": (3, 0),
    }  # fmt: skip


def test_a_schemes_name_stands_for_its_table():
    found = between([], ["tensor=3d", "tensor.axes.y=2", "branch=dsp", "branch.axes.g=2"])
    assert found.keys() == {"tensor.scheme", "tensor.axes.t", "tensor.axes.y", "branch.kind", "branch.axes.g"}
    assert found["tensor.axes.t"] == (2, None)
    there, here = compose([QUICK]), compose([QUICK])
    here.tensor.regions = copy.deepcopy(there.tensor.regions) | {"mlp": {"d_ff": ["t"], "length": ["t"]}}
    assert changes(there.to_dict(), None, here, MESH) == {
        "tensor.regions.mlp.length": (None, ["t"])
    }  # the file changed


def test_how_it_is_gone_on_is_no_change_and_no_secret_is_shown():
    there, here = compose([QUICK]), compose([QUICK, "checkpoint.resume=/elsewhere", "run.dir=other"])
    there.checkpoint.url, here.checkpoint.url = "s3://bucket/a", "s3://me:secret@bucket/a"
    here.resume.allow = ["optimizer.lr"]
    assert changes(there.to_dict(), None, here, MESH) == {}
    here.checkpoint.url = "s3://me:secret@bucket/b"
    assert changes(there.to_dict(), None, here, MESH) == {"checkpoint.url": ("s3://bucket/a", "s3://bucket/b")}


def test_a_checkpoint_from_elsewhere(tmp_path):
    there, here = compose([QUICK]), compose([QUICK, "optimizer.lr=0.5"])
    plan = {"mesh": {"stage": 1, "data": 4}}
    meta = Meta(1, 16, 0, "c", identity(there), "", plan)
    found = changes(None, meta, here, MESH)
    rate = (there.optimizer.lr, 0.5)
    assert found == {"optimizer.lr": rate, "mesh.data": (4, 2), "mesh.t": (None, 2)}
    journal, said = Journal(tmp_path / "journal.jsonl"), []
    report({}, journal, said.append)
    assert JsonLines.read(tmp_path / "journal.jsonl") == [] == said
    report(found, journal, said.append)
    (event,) = JsonLines.read(tmp_path / "journal.jsonl")
    assert (event["event"], event["keys"]["mesh.t"]) == ("changed", [None, 2])
    assert said[0] == f"changed  optimizer.lr: {rate[0]} there, 0.5 here" and len(said) == 3


def test_another_version_of_the_code_is_journalled_and_said(tmp_path):
    """Between two drivers of a run; the same one, and a journal of an older version without hashes, say nothing."""
    said, code = [], code_of(compose([QUICK]))
    assert len(code["platform"]) == 12 and {"python", "torch", "ray"} <= code.keys()
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write(events.Starting(world_size=1, cluster="processes", device="cpu"))
    report_code(code, journal, said.append)
    journal.write(events.Starting(world_size=1, cluster="processes", device="cpu", code=code))
    report_code(code, journal, said.append)
    assert said == [] and len(journal.events()) == 2
    report_code({**code, "platform": "0123456789ab", "own": "1"}, journal, said.append)
    assert said == [
        f"changed  code of platform: {code['platform']} before, 0123456789ab here",
        "changed  code of own: none before, 1 here",
    ]
    event = JsonLines.read(tmp_path / "journal.jsonl")[-1]
    assert event["event"] == "changed" and event["keys"]["code.platform"] == [code["platform"], "0123456789ab"]
