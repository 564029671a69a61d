"""Before a run forms, every node proves that it is of one mind with the driver."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.boundary.storage import open_storage
from platform.cluster.control import examination
from platform.cluster.crew.launchers import open_crew
from platform.config.fields import Config, Train
from platform.train.environment_proof import describe_environment, hash_module_source, list_versions
from platform.train.replies import Proof
from tests.doubles.fake_plan import run_fake
from tests.harness.process_tree import descendants, gone

pytestmark = pytest.mark.usefixtures("warm_server")
OWN = Proof(
    node="head",
    sees={"run.dir": "11", "checkpoint.url": "22"},
    code={"platform": "aa", "mine": "bb"},
    versions={"python": "3.11.2", "torch": "2.13.0"},
)


def other(**changes):
    """A worker's on another node, which differs by `changes`."""
    proof = replace(copy.deepcopy(OWN), node="n2")
    for key, value in changes.items():
        part, _, name = key.partition("__")
        getattr(proof, part)[name] = value
    return proof


def test_equal_proofs_say_nothing():
    assert examination.list_disagreements(OWN, other(), Config()) == []


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("sees__run.dir", "unreadable (FileNotFoundError)",
         "run.dir=/r: unreadable (FileNotFoundError) on node n2, 11 at the driver; all nodes must see the same"),
        ("sees__checkpoint.url", "33",
         "checkpoint.url=s3://b/c: 33 on node n2, 22 at the driver; all nodes must see the same"),
        ("code__mine", "cc", "cluster: code of mine: cc on node n2, bb at the driver; all nodes must run the same"),
        ("versions__torch", "2.12.0",
         "cluster: versions of torch: 2.12.0 on node n2, 2.13.0 at the driver; all nodes must run the same"),
    ],
)  # fmt: skip
def test_one_line_per_disagreement(key, value, line):
    config = Config()
    config.run.dir, config.checkpoint.url = "/r", "s3://user:secret@b/c"
    assert examination.list_disagreements(OWN, other(**{key: value}), config) == [line]


def test_a_worker_that_cannot_compile_as_asked():
    lacking = replace(OWN, node="n1", lacks={"train.compile": "there is no C++ compiler"})
    line = "train.compile=on: there is no C++ compiler on node n1; nearest legal: auto, off"
    assert examination.list_disagreements(OWN, lacking, Config(train=Train(compile="on"))) == [line]


def test_a_worker_whose_device_lacks_the_kernel():
    lacking = replace(OWN, node="n1", lacks={"train.attention_kernel": "Flash attention only supports sm80"})
    line = "train.attention_kernel=flash: Flash attention only supports sm80 on node n1; nearest legal: auto, math"
    config = Config(train=Train(attention_kernel="flash"))
    assert examination.list_disagreements(OWN, lacking, config) == [line]


def test_all_at_once():
    lines = examination.list_disagreements(
        OWN, other(code__platform="x", versions__torch="y", versions__python="z"), Config()
    )
    assert [line.split(":")[1] for line in lines] == [" code of platform", " versions of python", " versions of torch"]


def test_source_is_hashed_by_content_and_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    digests = {}
    for package, text in (("one_a", "x = 1"), ("one_b", "x = 1"), ("two", "x = 2")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "inner.py").write_text(text)
        __import__(package)
        digests[package] = hash_module_source(package)
    assert digests["one_a"] == digests["one_b"] != digests["two"]
    (tmp_path / "one_a" / "inner.py").rename(tmp_path / "one_a" / "other.py")
    assert hash_module_source("one_a") != digests["one_a"]
    (tmp_path / "module.py").write_text("y = 1")
    __import__("module")
    before = hash_module_source("module")
    (tmp_path / "module.py").write_text("y = 2")
    assert hash_module_source("module") != before
    assert (
        hash_module_source("platform") == hash_module_source("platform") and len(hash_module_source("platform")) == 12
    )


def test_a_proof_is_plain_and_names_what_cannot_be_read(config, tmp_path):
    config.checkpoint.every, config.checkpoint.resume = 1, str(tmp_path / "step-00000002-000001-aaaaaa")
    proof = describe_environment(config, tmp_path, "probe")
    assert proof.sees == dict.fromkeys(
        ("run.dir", "checkpoint.url", "checkpoint.resume"), "unreadable (FileNotFoundError)"
    )
    (tmp_path / "probe").write_text("x")
    assert len(describe_environment(config, tmp_path, "probe").sees["run.dir"]) == 12
    assert proof.versions == list_versions() and list_versions()["torch"].startswith("2.")


def test_a_run_on_nodes_that_disagree_is_refused_and_leaves_nothing_behind(config):
    config.checkpoint.every = 1
    run_dir, before = Path(config.run.dir), descendants()
    with pytest.raises(ConfigError) as caught:
        run_fake(config, 2, "OnAnotherNode")
    assert gone(descendants() - before)
    directory, storage, code = caught.value.violations
    assert directory.startswith(f"run.dir={run_dir}: unreadable (FileNotFoundError) on node n2, ")
    assert storage.startswith(f"checkpoint.url={run_dir}/checkpoints: unreadable (FileNotFoundError) on node n2, ")
    assert code.startswith("cluster: code of platform: 0123 on node n2, ")
    assert not run_dir.exists()


def test_probes_are_gone_whether_it_agrees_or_fails(config, job, tmp_path, monkeypatch):
    config.checkpoint.every = 1
    with open_crew("inline", job(1)) as crew:
        assert examination.compare_worker_environments(crew, config, tmp_path) == {}
        assert not list(tmp_path.rglob(".probe-*"))
        seen = []
        monkeypatch.setattr(crew, "call_ranks", lambda *a: seen.append(list(tmp_path.rglob(".probe-*"))) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            examination.compare_worker_environments(crew, config, tmp_path)
        assert len(seen[0]) == 2 and not list(tmp_path.rglob(".probe-*"))


def test_a_local_run_that_saves_nothing_proves_no_storage(config, job, tmp_path):
    config.checkpoint.on_stop = config.checkpoint.last = False
    with open_crew("inline", job(1)) as crew:
        assert examination.compare_worker_environments(crew, config, tmp_path) == {}
        assert describe_environment(config, tmp_path, "x").sees.keys() == {"run.dir"}
    assert (
        open_storage(str(tmp_path)).list_sizes("checkpoints") == {} and not Path(config.run.dir, "checkpoints").exists()
    )
