"""The embedded Ray is ours alone: who may connect, read or list."""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from platform.cluster.crew import leftovers, ray_session
from platform.cluster.crew.launchers import open_crew
from tests.harness.process_tree import descendants

pytestmark = pytest.mark.ray


def listening(processes):
    """The addresses on which these processes listen, as /proc has them: little-endian hexadecimal."""
    inodes = {}
    for process in processes:
        for file in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):  # it was closed meanwhile
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file)):
                    inodes[match[1]] = process
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                addresses.add(words[1].partition(":")[0])
    return addresses


def test_an_embedded_ray_listens_on_loopback_asks_for_a_token_and_hides_its_files(job, monkeypatch):
    before = listening({os.getpid()})  # what an earlier test of this process left
    with open_crew("local", job(1)) as crew:
        folder = Path(crew._launcher._path).parent
        loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
        ours = {*leftovers.find_processes_of_directory(str(folder)), *descendants(), os.getpid()}
        addresses = listening(ours)
        assert addresses and addresses <= loopback | before, addresses
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists() and "RAY_AUTH_MODE" not in os.environ


@pytest.mark.parametrize(
    "error",
    [
        Exception("The current node timed out during startup. This could happen because some of the raylet failed"),
        RuntimeError("Failed to start GCS. Last 0 lines of error files:"),
        TimeoutError("Timed out after 30 seconds"),
    ],
)
def test_an_embedded_ray_that_is_too_slow_is_started_again(error, monkeypatch, caplog):
    """With new files, and nothing left of what did not come up; another mistake is not tried again."""
    tried = []

    def init(*_, _temp_dir, **__):
        tried.append(Path(_temp_dir).parent)
        if len(tried) != 3:
            raise error

    monkeypatch.setattr(ray_session, "_init_ray", init)
    ray_session.EmbeddedRay(1, gpus=False).close()
    assert len({*tried}) == 3 and not any(folder.exists() for folder in tried)
    assert caplog.text.count("once more") == 2
    monkeypatch.setattr(ray_session, "_ATTEMPTS", 2)
    with pytest.raises(type(error)):
        ray_session.EmbeddedRay(1, gpus=False)
    error = ValueError("num_cpus")
    with pytest.raises(ValueError):
        ray_session.EmbeddedRay(1, gpus=False)
    assert len(tried) == 6 and not any(folder.exists() for folder in tried)
