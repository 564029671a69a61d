import gzip
import json
from dataclasses import replace

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data.corpus import open_corpus
from platform.data.data_checks import violations_of_sources
from platform.data.text_sources import find_stdlib_files, find_text_files, read_documents


def read(data):
    """The whole documents of a source."""
    joined = {}
    for number, piece in read_documents(find_text_files(data), data):
        joined[number] = joined.get(number, "") + piece
    return list(joined.values())


def test_a_file_is_one_document_of_any_ending_and_length(tmp_path):
    path = tmp_path / "book.xyz"
    content = "ein Käfer 🪲\r\n" * 20_000 + "ü" * 300_000  # long lines are cut inside a character, and healed
    path.write_bytes(content.encode())
    assert read(Data(kind="text", path=str(path))) == [content]


def test_a_folder_is_searched_for_text(tmp_path):
    for name in ("b.md", "a.txt", "c.bin", ".hidden.txt", "sub/d.py", ".git/e.py", "z.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "f.txt.gz").write_bytes(gzip.compress(b"f"))
    (tmp_path / "empty.txt").touch()
    assert read(Data(kind="text", path=str(tmp_path))) == ["a.txt", "b.md", "f", "sub/d.py", "z.txt"]


def test_a_glob_takes_what_it_matches(tmp_path):
    for name in ("a.log", "b.log", "c.txt", "sub/d.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(Data(kind="text", path=f"{tmp_path}/*.log")) == ["a.log", "b.log"]
    assert read(Data(kind="text", path=f"{tmp_path}/**/*.log")) == ["a.log", "b.log", "sub/d.log"]


def test_a_link_to_a_file_that_is_there_counts_once(tmp_path, caplog):
    """In a folder and by a glob; a link to a file elsewhere counts, as the only one."""
    caplog.set_level("INFO")
    (tmp_path / "elsewhere.txt").write_text("e")
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("b", "d"):
        (folder / f"{name}.txt").write_text(name)
    (folder / "a.txt").symlink_to("b.txt")
    (folder / "c.txt").hardlink_to(folder / "b.txt")
    for name in ("x", "y"):
        (folder / f"{name}.txt").symlink_to(tmp_path / "elsewhere.txt")
    for path in (folder, f"{folder}/*.txt"):
        assert read(Data(kind="text", path=str(path))) == ["b", "d", "e"]
    assert f"{folder}/a.txt is {folder}/b.txt, which counts once" in caplog.text


@pytest.mark.parametrize("pack", [lambda b: b, gzip.compress])
def test_jsonl_holds_a_document_per_line(tmp_path, pack):
    path = tmp_path / ("x.jsonl" if pack(b"") == b"" else "x.jsonl.gz")
    rows = [{"body": "one\ntwo"}, {"body": ""}, {"body": "dreißig", "id": 3}]
    path.write_bytes(pack("\n\n".join(json.dumps(row) for row in rows).encode()))
    assert read(Data(kind="text", path=str(path), field="body")) == ["one\ntwo", "dreißig"]


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a\\ud83db"}')
    assert read(Data(kind="text", path=str(path))) == ["a?b"]


def test_the_standard_library_is_found_without_its_tests():
    files = find_stdlib_files(Data())
    names = {file.name for file in files}
    assert {"argparse.py", "typing.py"} <= names and len(files) > 200
    assert not any({"test", "tests", "site-packages"} & set(file.parts) for file in files)
    assert files == sorted(files) and violations_of_sources(Data()) == []


JSONL = '{"content": "abc", "title": "t", "id": 7}\n'
BAD = {
    "nul.txt": (b"text\0text", "a binary file (NUL at byte 4)"),
    "latin.txt": ("ein Käfer".encode("latin-1"), "not UTF-8 at byte 5"),
    "cut.txt": ("Kä".encode()[:-1], "not UTF-8 at byte 1"),
    "empty.txt": (b"", "no text in it"),
    "lacks.jsonl": (JSONL.encode(), "data.field=text is missing in line 1; its fields with text: content, title"),
    "torn.jsonl": (b'{"text": "abc"\n', "line 1 is not JSON"),
    "list.jsonl": (b"[1]\n", "line 1 is a JSON list"),
    "torn.jsonl.gz": (gzip.compress(b'{"text": "abc"}\n' * 99)[:-9], "end-of-stream"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_line(tmp_path, name):
    content, reason = BAD[name]
    path = tmp_path / name
    path.write_bytes(content)
    data = Data(kind="text", path=str(path), cache=str(tmp_path / "cache"))
    with pytest.raises(ConfigError) as error:
        open_corpus(data, length=8, vocab=300, seed=0)
    (line,) = error.value.violations
    assert line.startswith("data.path=") and name in line and reason in line and "\n" not in line
    if name not in ("cut.txt", "torn.jsonl.gz"):  # their beginnings are whole
        assert violations_of_sources(data) == [line]


def test_faults_deep_inside_are_found_while_preparing(tmp_path):
    blocks = tmp_path / "deep.txt"
    blocks.write_bytes(b"good line\n" * 100_000 + b"\xff")
    lines = tmp_path / "deep.jsonl"
    lines.write_text('{"text": "good"}\n' * 1000 + '{"text": 3, "other": "x"}\n')
    for path, reason in (
        (blocks, "not UTF-8 at byte 1000000"),
        (lines, "data.field=text is not a string in line 1001; its fields with text: other"),
    ):
        data = Data(kind="text", path=str(path), cache=str(tmp_path / "cache"))
        assert violations_of_sources(data) == []
        with pytest.raises(ConfigError, match=reason):
            open_corpus(data, length=8, vocab=300, seed=0)
    assert not list((tmp_path / "cache").iterdir())  # nothing is left


def test_paths_are_refused_with_what_is_near(tmp_path):
    (tmp_path / "shakespeare.txt").write_text("to be")
    (tmp_path / "photo.jpg").write_text("x")
    (missing,) = violations_of_sources(Data(kind="text", path=str(tmp_path / "shakespear.txt")))
    assert "nearest:" in missing and missing.endswith("shakespeare.txt")
    (photos,) = violations_of_sources(Data(kind="text", path=str(tmp_path / "photos" / "*.txt")))
    assert "no file matches" in photos
    (tmp_path / "shakespeare.txt").unlink()
    (folder,) = violations_of_sources(Data(kind="text", path=str(tmp_path)))
    assert ".txt .md" in folder and ".jsonl" in folder


def test_every_mistake_is_named_at_once(data):
    assert violations_of_sources(data) == []
    (unknown,) = violations_of_sources(replace(data, kind="txet"))  # another test may have registered more
    assert all(kind in unknown for kind in ("stdlib", "text", "pairs", "synthetic"))
    assert "needs a file" in violations_of_sources(replace(data, path=""))[0]
    several = violations_of_sources(Data(kind="stdlib", path="x", validation=1.5), vocab=256)
    assert [line.split("=")[0] for line in several] == ["data.validation", "data.path", "model.vocab"]
    assert "257" in several[2] and "data=text" in several[1]
