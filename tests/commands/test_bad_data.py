"""Bad data, by command: one line that names the key, the file and the place; status 2; nothing is left behind.

Some faults show at once, others deep inside a file, when it is read as a whole: both before any process starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from platform.data.token_files import write_megatron
from platform.launch import main
from tests.harness.commands import refused

TEXT = "".join(f"line {i} of a text, {i * i} sheep\n" for i in range(400))
TALK = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

QUESTION = {"messages": TALK["messages"][:1]}


def lines(*records) -> bytes:
    return b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in records)


def parquet(path: Path, column: str = "text") -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    files.write_table(arrow.table({column: [TEXT, TEXT]}), path)


def tokenizer(path: Path, size: int) -> None:
    """A tokenizer of so many entries, in the library's file."""
    from tokenizers import Tokenizer, models

    words = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, size)}}
    word_level = Tokenizer(models.WordLevel(words, unk_token="w1"))
    word_level.add_special_tokens(["<|endoftext|>"])
    word_level.save(str(path))


def torn(make: Callable[[Path], None], keep: float = 0.6) -> Callable[[Path], None]:
    """Write a file and cut its end off."""

    def write(path: Path) -> None:
        make(path)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])

    return write


def indexed(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Write Megatron-LM's .bin and .idx, and change them."""

    def write(path: Path) -> None:
        write_megatron(path.with_suffix(""), iter([np.arange(200), np.arange(90)]), 300)
        change(path)

    return write


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def bytes_of(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


IDS = "data=tokens data.path=FILE"
TALKS = "data=instructions data.path=FILE data.chat_template=chatml"
GIVEN = "data=text data.path=a.txt data.tokenizer=FILE"
# name of the file -> what writes it, the arguments, what the line says
BAD: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "torn.parquet": (torn(parquet), "data=text data.path=FILE", "magic bytes not found"),
    "column.parquet": (lambda p: parquet(p, "body"), "data=text data.path=FILE", "no such column; its columns: body"),
    "no.parquet": (bytes_of(b"PAR1" * 9), "data=text data.path=FILE", "arquet"),
    "torn.arrow": (bytes_of(b"\xff\xff\xff\xff"), "data=text data.path=FILE", "torn"),
    "deep.jsonl": (bytes_of(lines(*[{"text": TEXT}] * 40, {"a": 1})), "data=text data.path=FILE", "missing in line 41"),
    "broken.jsonl": (bytes_of(lines({"text": TEXT}, b'{"text": "a')), "data=text data.path=FILE", "line 2 is"),
    "latin.txt": (bytes_of(TEXT.encode() * 20 + b"\xe9t\xe9"), "data=text data.path=FILE", "not UTF-8 at byte"),
    "odd.bin": (bytes_of(b"\1\0" * 400 + b"\1"), IDS, "are no whole number of tokens of data.dtype=uint16"),
    "large.bin": (bytes_of(np.arange(500, dtype="<u2").tobytes()), IDS, "nearest legal: model.vocab=500"),
    "type.bin": (bytes_of(np.full(500, 2**32 - 7, "<u4").tobytes()), f"{IDS} data.dtype=int32", "of another type"),
    "torn.bin": (indexed(cut), IDS, "torn.bin"),
    "index.bin": (indexed(lambda p: cut(p.with_suffix(".idx"))), IDS, "index.idx"),
    "foreign.bin": (indexed(lambda p: p.with_suffix(".idx").write_bytes(b"no index") and None), IDS, "foreign.idx"),
    "high.jsonl": (bytes_of(lines(*[{"input_ids": [1, 2, 3]}] * 50, {"input_ids": [1, 300]})), IDS, "has token 300"),
    "ids.jsonl": (bytes_of(lines({"input_ids": [1, "2"]})), IDS, "is no list of tokens in line 1"),
    "minus.jsonl": (bytes_of(lines({"input_ids": [1, -2]})), IDS, "has token -2 in line 1"),
    "ids_field.jsonl": (bytes_of(lines({"tokens": [1, 2]})), IDS, "data.field=input_ids is missing in line 1"),
    "talk_field.jsonl": (bytes_of(lines({"text": "a"})), TALKS, "line 1 has no messages in data.field=messages"),
    "question.jsonl": (bytes_of(lines(*[TALK] * 40, QUESTION)), TALKS, "line 41 has no answer"),
    "no_template.jsonl": (bytes_of(lines(*[TALK] * 40)), TALKS.replace("chatml", ""), "the tokenizer has none"),
    "talks.txt": (bytes_of(b"text"), TALKS, "no file of records"),
    "no_tokenizer.json": (bytes_of(b'{"model": 7}'), GIVEN, "data.tokenizer="),
    "torn.json": (torn(lambda p: tokenizer(p, 90)), GIVEN, "data.tokenizer="),
    "large.json": (lambda p: tokenizer(p, 301), GIVEN, "has 301 tokens, and the model has model.vocab=300"),
    "no.model": (bytes_of(b"\x0a\xff\xff\xff\xff"), GIVEN, "data.tokenizer="),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_it_ends_with_one_line(tmp_path, name):
    write, arguments, reason = BAD[name]
    write(tmp_path / name)
    (tmp_path / "a.txt").write_text(TEXT)
    typed = arguments.replace("FILE", name).split()
    [line] = refused(*typed, "data.cache=cache", "run.dir=run", cwd=tmp_path)
    assert line.startswith("config: data.") and reason in line, line
    assert name.partition(".")[0] in line or "data.chat_template" in line, line


@pytest.mark.parametrize("kind", ["text", "instructions"])
def test_what_python_does_not_hold(kind, tmp_path, monkeypatch, capsys):
    """A date of the year 2,700,000, and lists 900 deep, are refused by the name of their file."""
    monkeypatch.chdir(tmp_path)
    if kind == "text":
        dates = pyarrow.array([10**9] * 300, pyarrow.int32()).cast(pyarrow.date32())
        pyarrow.parquet.write_table(pyarrow.table({"text": dates}), "d.parquet")
        overrides = ["data.path=d.parquet"]
    else:
        line = '{"messages": [{"role": "user", "content": "hi", "more": %s}, {"role": "assistant", "content": "x"}]}\n'
        (tmp_path / "n.jsonl").write_text(line % ("[" * 900 + "]" * 900) * 50)
        overrides = ["data.path=n.jsonl", "data.field=messages", "data.chat_template=chatml", "model.vocab=400"]
    assert main(["+experiment=gpt_quick", "cluster=inline", f"data={kind}", *overrides, "run.dir=run"]) == 2
    assert re.fullmatch(r"config: data.path=\S+: .+\n", capsys.readouterr().err)
