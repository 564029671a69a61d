"""Drivers under what strangers send to all of their ports, that are stopped for a while, or whose storage is full: the
command ends as if nothing had been, and says what was."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import find_newest_checkpoint, list_attempts, load_manifest, verify_checkpoint
from platform.checkpoint.manifest import Refused
from platform.cluster.crew import channel
from platform.monitor import JsonLines, MetricsLog
from tests.fuzz import listener
from tests.harness.commands import QUICK, SMALL, TIMEOUT
from tests.harness.disks import small_disk

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

PLAN = "cluster=processes tensor=1d tensor.axes.t=2 parallel.data=1".split()
RUN = [QUICK, *SMALL, *PLAN, "data=synthetic", "optimizer.warmup_steps=2", "elastic.min_workers=2"]
STORE = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")  # as a client of torch's store begins


def started(module: str, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-m", f"platform.{module}", *arguments], cwd=cwd, **pipes)


def losses(folder: Path, steps: int) -> list[tuple[float, float]]:
    rows = MetricsLog.read_rows(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return [(row["loss"], row["grad_norm"]) for row in rows]


def undisturbed(tmp_path: Path, steps: int) -> list[tuple[float, float]]:
    process = started("launch", *RUN, f"train.steps={steps}", "run.dir=undisturbed", cwd=tmp_path)
    out = process.communicate(timeout=TIMEOUT)[0]
    assert process.returncode == 0, out
    return losses(tmp_path / "undisturbed", steps)


def ports(pid: int) -> list[tuple[str, int]]:
    """Where a process listens for TCP connections; [] once it has ended."""
    addresses = []
    with suppress(OSError):
        held = {os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in held:
                host, port = local.split(":")
                addresses.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return addresses


class Strangers:
    """Who sends junk to every port of a process for as long as it lives, and holds silent connections to it."""

    def __init__(self, process: subprocess.Popen[str]):
        self.ports: set[tuple[str, int]] = set()
        self.sent, self._process, self._draw = 0, process, random.Random(0)

    def __enter__(self) -> Strangers:
        self._thread = threading.Thread(target=self._disturb)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _disturb(self) -> None:
        with ExitStack() as silent:
            while self._process.poll() is None:
                for address in ports(self._process.pid):
                    if address not in self.ports:
                        self.ports.add(address)
                        for _ in range(300):
                            with suppress(OSError):
                                silent.enter_context(socket.create_connection(address, timeout=1))
                    with suppress(OSError), socket.create_connection(address, timeout=1) as stranger:
                        stranger.sendall(self._junk())
                        self.sent += 1
                time.sleep(0.005)

    def _junk(self) -> bytes:
        draw, to = self._draw, listener.Target(None, channel.new_nonce())
        kinds = (listener.of_bytes, listener.of_protocols, listener.of_json, listener.of_depth, listener.of_size)
        store = STORE + bytes([draw.randrange(20)]) + draw.randbytes(draw.randrange(1, 200))
        return draw.choice([store, listener.of_emptiness(draw, to), draw.choice(kinds)(draw, to)])


def test_strangers_at_the_ports_of_a_run(tmp_path):
    expected = undisturbed(tmp_path, 40)
    process = started("launch", *RUN, "train.steps=40", "run.dir=run", cwd=tmp_path)
    with Strangers(process) as strangers:
        out = process.communicate(timeout=TIMEOUT)[0]
    assert process.returncode == 0, out
    assert strangers.sent > 100 and len(strangers.ports) >= 2
    assert losses(tmp_path / "run", 40) == expected
    assert "1000 connections were refused" in out or "100 connections were refused" in out, out
    assert not [e for e in JsonLines.read_objects(tmp_path / "run" / "journal.jsonl") if e["event"] == "failure"]
    assert len(out.splitlines()) < 60, "nobody fills a log"


ASKED = {  # arguments of each command
    "generate": ("saved", "--prompts=ids.jsonl", "--tokens=12", "cluster=processes", "tensor=1d", "tensor.axes.t=2"),
    "evaluate": ("saved", "--samples=16", "cluster=processes", "tensor=1d", "tensor.axes.t=2"),
    "doctor": (*RUN[:1], *PLAN),
}


@pytest.mark.parametrize("command", ASKED)
def test_strangers_at_the_ports_of_who_examines_and_answers(tmp_path, command):
    process = started("launch", *RUN, "train.steps=2", "checkpoint.every=2", "run.dir=saved", cwd=tmp_path)
    out = process.communicate(timeout=TIMEOUT)[0]
    assert process.returncode == 0, out
    (tmp_path / "ids.jsonl").write_text('{"ids": [1, 2, 3]}\n')
    answers = []
    for disturbed in (False, True):
        process = started(command, *ASKED[command], cwd=tmp_path)
        with Strangers(process) if disturbed else ExitStack() as strangers:
            out = process.communicate(timeout=TIMEOUT)[0]
        assert process.returncode == 0, out
        answers.append([line for line in out.splitlines() if "refused" not in line])
    assert strangers.sent > 20 and strangers.ports
    assert len(out.splitlines()) < 60, "nobody fills a log"
    if command != "doctor":  # which says how long things took
        assert answers[0] == answers[1]


def test_a_driver_that_is_stopped_for_a_while(tmp_path):
    expected = undisturbed(tmp_path, 200)
    process = started("launch", *RUN, "train.steps=200", "elastic.hang_seconds=2", "run.dir=run", cwd=tmp_path)
    rows, draw = tmp_path / "run" / "metrics.jsonl", random.Random(0)
    try:
        for _ in range(2):
            while not (rows.exists() and rows.read_text()):
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(draw.uniform(0, 0.5))
            assert process.poll() is None
            process.send_signal(signal.SIGSTOP)
            time.sleep(20)
            process.send_signal(signal.SIGCONT)
        out = process.communicate(timeout=TIMEOUT)[0]
    finally:
        process.kill()
    assert process.returncode == 0, out
    assert losses(tmp_path / "run", 200) == expected
    assert not [e for e in JsonLines.read_objects(tmp_path / "run" / "journal.jsonl") if e["event"] == "failure"]


@pytest.mark.parametrize("freed", [True, False], ids=["room again", "full to the end"])
def test_a_storage_that_is_full_for_several_workers(tmp_path, freed):
    steps = 60

    def failed(what: str = "checkpoint_failed") -> list[dict]:
        return [e for e in JsonLines.read_objects(tmp_path / "run" / "journal.jsonl") if e["event"] == what]

    with small_disk(tmp_path / "small", "2m") as disk:
        storage = open_storage(f"{disk.path}/checkpoints")
        saves = ["checkpoint.every=4", "checkpoint.keep=2", f"checkpoint.url={storage.url}"]
        process = started("launch", *RUN, *saves, f"train.steps={steps}", "run.dir=run", cwd=tmp_path)
        while not find_newest_checkpoint(storage).manifest:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        disk.fill()
        looks = 0
        while process.poll() is None:
            looks += good(storage) > 0
            if freed and failed() and (disk.path / "ballast").exists():
                disk.free()
            time.sleep(0.1)
        out = process.communicate()[0]
        assert looks and good(storage)
        newest = find_newest_checkpoint(storage).manifest.meta.step
        assert failed() and all("No space left" in event["reason"] for event in failed()), failed()
        named = [line for line in out.splitlines() if "WARNING: checkpoint failed" in line]
        assert named and all(f"checkpoint.url={storage.url}: " in line for line in named), out
        assert "Traceback" not in out and not failed("failure"), out
        if freed:
            assert process.returncode == 0 and newest == steps, out
            assert losses(tmp_path / "run", steps) == undisturbed(tmp_path, steps)
        else:
            assert process.returncode == 1 and newest < steps, out
            assert f"the same command continues after step {newest}" in out, out


def good(storage) -> int:
    """How many checkpoints are listed as good; every byte of each is."""
    count = 0
    for attempt in list_attempts(storage):
        with suppress(Refused, FileNotFoundError):  # in the making, or pruned meanwhile
            load_manifest(storage, attempt.directory_name)
            try:
                verify_checkpoint(storage, attempt.directory_name)
                count += 1
            except (Refused, FileNotFoundError):
                assert "manifest.json" not in storage.list_sizes(attempt.directory_name), f"half of {attempt} is listed"
    return count
