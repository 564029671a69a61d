"""Tables of strangers are parsed in a child process: refused in one line, whatever becomes of it."""

import os
import re
import signal
import struct

import pytest

from platform.boundary import confinement
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed
from platform.config.fields import Data
from platform.data import text_sources

pa = pytest.importorskip("pyarrow")
ipc, parquet = pytest.importorskip("pyarrow.ipc"), pytest.importorskip("pyarrow.parquet")
TABLES = "platform.data.parsers:answer_table"


def stream(path, table, **options):
    with ipc.new_stream(path, table.schema, options=ipc.IpcWriteOptions(**options)) as to:
        to.write_table(table)


def offsets(path, values):
    """A stream of one column of texts whose offsets are these."""
    stream(path, pa.table({"text": ["abcd", "ef", "g", "h"]}))
    good = struct.pack("<5i", 0, 4, 6, 7, 8)
    assert path.read_bytes().count(good) == 1
    path.write_bytes(path.read_bytes().replace(good, struct.pack("<5i", *values)))


def dictionary(path):
    """256 rows that are one text of 1 MiB."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 256), pa.array(["abcdefgh" * (1 << 17)]))
    parquet.write_table(pa.table({"text": column}), path)


def packed(path, column):
    """A column of 1.2 GB, that is zeros, in some kB."""
    stream(path, pa.table({"text": ["a"], column: ["\0" * 1_200_000_000]}), compression="zstd")


REFUSED = {
    "far.arrow": (lambda path: offsets(path, [0x7FFF0000 + 8 * i for i in range(5)]), "offset"),
    "falling.arrow": (lambda path: offsets(path, [8, 7, 6, 4, 0]), "offset"),
    "dictionary.parquet": (dictionary, "unpacks to more than"),
    "zeros.arrow": (lambda path: packed(path, "text"), "needs more than [0-9]+ MiB of memory"),
}


def refusal(path) -> str:
    with pytest.raises(ConfigError) as caught:
        for _ in text_sources.read_documents([path], Data(kind="text", path=str(path))):
            pass
    [line] = caught.value.violations
    assert line.startswith(f"data.path={path}: ") and line.isprintable() and len(line) < 500
    return line


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_table_is_refused(tmp_path, name):
    write, wanted = REFUSED[name]
    write(tmp_path / name)
    assert re.search(wanted, refusal(tmp_path / name))


def test_columns_that_are_not_read_are_not_unpacked(tmp_path):
    packed(tmp_path / "a.arrow", "more")
    data = Data(kind="text", path=str(tmp_path / "a.arrow"))
    assert list(text_sources.read_documents([tmp_path / "a.arrow"], data)) == [(0, "a")]


def test_a_child_that_dies_is_one_line_and_the_next_file_is_read(tmp_path):
    for name in ("a.parquet", "b.parquet"):
        parquet.write_table(pa.table({"text": [f"row {i}" for i in range(2000)]}), tmp_path / name)
    pieces = text_sources.read_documents([tmp_path / "a.parquet"], Data(kind="text", path=str(tmp_path / "a.parquet")))
    next(pieces)
    [parser] = [p for p in confinement.list_living_parsers() if p.name == TABLES]
    os.kill(parser.pid, signal.SIGSEGV)
    with pytest.raises(ConfigError, match=r"a.parquet: its parser died \(SIGSEGV\)"):
        list(pieces)
    documents = text_sources.read_documents(
        [tmp_path / "b.parquet"], Data(kind="text", path=str(tmp_path / "b.parquet"))
    )
    assert len(list(documents)) == 2000


def test_children_are_used_again(tmp_path):
    parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    data = Data(kind="text", path=str(tmp_path / "a.parquet"))
    pids = set()
    for _ in range(5):
        assert list(text_sources.read_documents([tmp_path / "a.parquet"], data)) == [(0, "a")]
        pids |= {p.pid for p in confinement.list_living_parsers() if p.name == TABLES}
    assert len(pids) == 1


def test_a_child_knows_neither_secrets_nor_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    parser = confinement.ParserProcess(TABLES)
    with pytest.raises(Malformed):
        parser.request_answer(
            {"do": "open", "form": "arrow", "size": 0, "columns": []},
            b"",
            confinement.compute_limits(1 << 29, 10, 1 << 20),
        )
    with open(f"/proc/{parser.pid}/environ") as environment, open(f"/proc/{parser.pid}/maps") as maps:
        assert "hush" not in environment.read() and "torch" not in maps.read()
    parser.close()
