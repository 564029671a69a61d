import os
import subprocess
import sys

import pytest
import yaml

from platform.boundary.refusals import ConfigError
from platform.boundary.storage import open_storage
from platform.cluster import driver
from platform.cluster.run_directory import RunDirectory
from platform.config.fields import Config, Eval
from platform.monitor import Journal, events
from platform.predict.make_plan import make_plan


@pytest.fixture
def directory(config):
    return RunDirectory(config.run.dir)


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        with call(*arguments):
            pass
    return caught.value.violations


def contents(path):
    return {file.name: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_claiming_writes_the_configuration_and_the_plan(directory, config):
    config.checkpoint.url = config.checkpoint.resume = "s3://user:password@bucket/run"
    with directory.claim(config, {"mesh": {"data": 2}}):
        written = (directory.path / "config.yaml").read_text()
    assert "password" not in written
    values = config.to_dict()
    values["checkpoint"] |= {"url": "s3://bucket/run", "resume": "s3://bucket/run"}
    assert yaml.safe_load(written) == values
    assert '"data": 2' in (directory.path / "plan.json").read_text()


def test_the_same_run_may_come_back_with_everything_else_changed(directory, config):
    with directory.claim(config, {}):
        pass
    config.train.steps, config.cluster.kind, config.tensor.scheme, config.data.cache = 7, "ray", "1d", "elsewhere"
    with directory.claim(config, {}):
        assert Config.from_dict(yaml.safe_load((directory.path / "config.yaml").read_text())) == config


def test_another_identity_is_refused_by_name_and_nothing_is_touched(directory, config):
    with directory.claim(config, {}):
        pass
    before = contents(directory.path)
    config.model.layers, config.seed, config.optimizer.lr = 9, 5, 0.25
    first, *keys = refusal(directory.claim, config, {})
    assert str(directory.path) in first and "holds another run" in first
    assert [key.partition("; fixed: ")[0] for key in keys] == [
        "model.layers: 2 there, 9 here", "optimizer.lr: 0.001 there, 0.25 here", "seed: 0 there, 5 here",
    ]  # fmt: skip
    assert {name: text for name, text in contents(directory.path).items() if name != "driver.lock"} == {
        name: text for name, text in before.items() if name != "driver.lock"
    }


def test_what_is_allowed_to_change_is_the_runs_identity_from_then_on(directory, config):
    with directory.claim(config, {}) as earlier:
        assert earlier is None
    was = config.to_dict()
    config.optimizer.lr, config.resume.allow = 0.25, ["optimizer.lr"]
    with directory.claim(config, {}) as earlier:
        assert earlier == was
    config.resume.allow = []
    directory.check_identity(config)
    config.optimizer.lr = 0.001
    first, key = refusal(directory.claim, config, {})
    assert "resume.allow=[optimizer.lr]" in first and key == "optimizer.lr: 0.25 there, 0.001 here"


def test_a_run_that_is_refused_late_leaves_the_configuration_as_it_was(directory, config):
    def late(config):
        with pytest.raises(ConfigError), directory.claim(config, {"mesh": {"data": 9}}):
            raise ConfigError("the corpus is another")

    late(config)
    assert not (directory.path / "config.yaml").exists() and not (directory.path / "plan.json").exists()
    with directory.claim(config, {}):
        pass
    before = contents(directory.path)
    config.optimizer.lr, config.resume.allow = 0.25, ["optimizer"]
    late(config)
    assert contents(directory.path) == before


def test_foreign_files_stay_and_a_foreign_configuration_is_refused(directory, config):
    (directory.path / "logs").mkdir(parents=True)
    (directory.path / "notes.txt").write_text("mine")
    (directory.path / "logs" / "mine.log").write_text("mine")
    with directory.claim(config, {}):
        pass
    assert (directory.path / "notes.txt").read_text() == (directory.path / "logs" / "mine.log").read_text() == "mine"
    for foreign in ("- a list", "a: [torn", "learning_rate: 3", "text"):
        (directory.path / "config.yaml").write_text(foreign)
        assert "is not a run's configuration" in refusal(directory.claim, config, {})[0]
        assert (directory.path / "config.yaml").read_text() == foreign


def test_a_directory_that_cannot_be(tmp_path, config):
    (tmp_path / "file").write_text("")
    directory = RunDirectory(tmp_path / "file" / "run")
    assert not directory.find_final_step(1, Eval())
    [line] = refusal(directory.claim, config, {})
    assert "Not a directory" in line and str(directory.path) in line
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    assert "Is a directory" in refusal(RunDirectory(tmp_path / "run").claim, config, {})[0]


def test_one_driver_at_a_time(directory, config):
    with directory.claim(config, {}):
        [line] = refusal(RunDirectory(directory.path).claim, config, {})
    assert f"in use by process {os.getpid()} on " in line
    with directory.claim(config, {}):
        pass


def test_the_lock_of_a_dead_driver_is_taken_over(directory, config):
    script = """
import os, signal, sys
from platform.boundary.storage import open_storage
from platform.cluster import driver
from platform.cluster.run_directory import RunDirectory
from platform.config.fields import Config
with RunDirectory(sys.argv[1]).claim(Config(), {}):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    config.data.kind = Config().data.kind
    dead = subprocess.run([sys.executable, "-c", script, str(directory.path)], env=os.environ)
    assert dead.returncode == -9
    assert (directory.path / "driver.lock").read_text().startswith("process ")
    with directory.claim(config, {}):
        assert (directory.path / "driver.lock").read_text().startswith(f"process {os.getpid()} ")


def test_a_run_is_finished_when_its_journal_says_so(directory):
    assert not directory.find_final_step(5, Eval())
    directory.path.mkdir()
    journal = Journal(directory.journal)
    journal.write(events.FirstStep(step=1))
    assert not directory.find_final_step(5, Eval())
    journal.write(events.Done(step=5))
    assert (
        directory.find_final_step(5, Eval())
        and directory.find_final_step(4, Eval())
        and not directory.find_final_step(6, Eval())
    )


def modes(directory):
    return {name: (directory.path / name).stat().st_mode & 0o777 for name in ("", "logs")}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027])
def test_a_run_is_its_users_alone_unless_the_directory_was_there(directory, config, umask):
    before = os.umask(umask)
    try:
        with directory.claim(config, {}):
            assert modes(directory) == {"": 0o700, "logs": 0o700}
        directory.path.chmod(0o750)
        with directory.claim(config, {}):
            assert modes(directory) == {"": 0o750, "logs": 0o700}
        storage = open_storage(str(directory.path / "checkpoints"))
        storage.write("step-1/manifest.json", [memoryview(b"{}")])
        paths = [directory.path / "checkpoints", directory.path / "checkpoints/step-1"]
        assert {path.stat().st_mode & 0o777 for path in paths} == {0o700}
    finally:
        os.umask(before)


def test_a_second_driver_is_told_who_has_the_directory_before_it_looks_for_places(directory, config, monkeypatch):
    directory.refuse_if_locked()  # there is none
    with directory.claim(config, {}):
        assert f"in use by process {os.getpid()} on" in refused(directory.refuse_if_locked)
        config.cluster.kind = "ray"
        monkeypatch.setattr("platform.cluster.resources.reserve_or_suggest", lambda *_, **__: pytest.fail("too early"))
        assert "in use by process" in refused(lambda: driver.drive_run(config, make_plan(config)))
    directory.refuse_if_locked()
    with directory.claim(config, {}):  # asking has not taken it
        pass


def refused(call):
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)
