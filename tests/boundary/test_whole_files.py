"""A file that a user names is written as a whole in one way, whatever is there: nothing else is replaced or lost."""

from __future__ import annotations

import ast
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import platform
from platform.boundary.local_files import ReplacedFile
from platform.boundary.refusals import ConfigError

ROOT = Path(platform.__path__[-1])
# functions that write a file in another way, and why a user's file is not among theirs
OTHERS = {
    "boundary/local_files.py": "replace_file and draft_folder themselves",
    "boundary/parser_process.py": "a pipe to its parent",
    "boundary/storage.py": "a storage that appears when it is committed",
    "cluster/crew/ray_session.py": "in a folder of its own",
    "cluster/crew/torchrun.py": "a descriptor",
    "cluster/answer_scores.py": "Lines: a new file, made with x",
    "cluster/endings.py": "adds to a log",
    "data/cache.py": "in a draft folder",
    "data/cache_entries.py": "a lock",
    "data/source_kind.py": "in a draft folder",
    "data/text_sources.py": "in a draft folder",
    "data/token_files.py": "in a draft folder",
    "data/tokenizer.py": "in a draft folder",
    "data/__main__.py": "in a draft folder, whose files replace regular ones alone",
    "evaluate.py": "in a folder of its own",
    "jobs/job_state.py": "adds to a record",
    "jobs/ray_node.py": "a log of its own",
    "jobs/supervisor.py": "in a folder of its own",
    "monitor/sinks/__main__.py": "a file of /proc",
    "monitor/sinks/sink_process.py": "adds to a log",
    "status/seen_run.py": "in a folder of its own",
    "train/worker_records.py": "adds to a log",
}


def writers(path: Path) -> list[int]:
    """Return the lines of a file that write or replace a file."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            modes = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
            opened = name == "open" and any(isinstance(m, str) and set(m) & set("wax") and len(m) < 4 for m in modes)
            on_path = isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Constant)
            moved = name == "replace" and on_path and len(node.args) == 1  # of a text there are two
            texts = name in ("write_bytes", "rename") or (name == "write_text" and len(node.args) == 1)
            if opened or moved or texts:
                lines.append(node.lineno)
    return lines


def test_there_is_one_way_to_write_a_whole_file() -> None:
    writing = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if writers(path)}
    excused = {name for name in writing if name in OTHERS or name.split("/")[0] in OTHERS}
    assert writing - excused == set(), "ReplacedFile writes what a user names, replace_file what a run does"


def test_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_text("x")
    except OSError:
        device = Path("/dev/null")  # nobody but root makes one, or may harm this one
    ReplacedFile(device, "--output").write("page")
    assert stat.S_ISCHR(device.lstat().st_mode)


def test_the_reader_of_a_pipe_gets_all_of_it(tmp_path: Path) -> None:
    pipe, texts = tmp_path / "pipe", []
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="--output=.*pipe: cannot be written: No such device"):
        ReplacedFile(pipe, "--output")  # nobody reads: it does not wait
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()))
    reader.start()
    while True:
        try:
            file = ReplacedFile(pipe, "--output")
            break
        except ConfigError:
            continue
    reader.join(0.1)
    file.write("page" * 50_000)
    reader.join(10)
    assert texts == ["page" * 50_000] and stat.S_ISFIFO(pipe.lstat().st_mode)


def test_a_socket_and_a_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s")
        for name in ("s", ".", "", "none/x", "x" * 300):
            with pytest.raises(ConfigError, match="cannot be written: "):
                ReplacedFile(name, "--output")
    assert os.listdir(tmp_path) == ["s"] and stat.S_ISSOCK(os.lstat("s").st_mode)


def test_a_link_stays_and_its_target_keeps_mode_and_owner(tmp_path: Path) -> None:
    target, link, dangling = tmp_path / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_text("before")
    target.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(target, 12345, 12346)
    owner = (target.stat().st_uid, target.stat().st_gid)
    link.symlink_to("target")
    dangling.symlink_to("new")
    for path in (link, dangling):
        ReplacedFile(path, "--output").write("after")
        assert path.is_symlink() and path.read_text() == "after"
    state = target.stat()
    assert (stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid) == (0o640, *owner)
    assert sorted(os.listdir(tmp_path)) == ["dangling", "link", "new", "target"]


def test_own_output_is_added_to(tmp_path: Path) -> None:
    code = (
        "from platform.boundary.local_files import ReplacedFile; print('first', flush=True);"
        "ReplacedFile('/dev/stdout', '--json').write('{}\\n'); print('last')"
    )
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True, timeout=60)
    assert (tmp_path / "log").read_text() == "first\n{}\nlast\n" and os.listdir(tmp_path) == ["log"]
