"""Prompts of any bytes, answers that do not fit, and files that cannot be written: refused in a line before a model is
loaded, and no half a file is left."""

from __future__ import annotations

import json
import os
import shutil
import stat

import pytest

from platform.boundary.local_files import ReplacedFile
from platform.boundary.refusals import ConfigError
from platform.checkpoint.__main__ import main as verify
from platform.cluster import asked_model, session
from platform.cluster.answer_scores import Lines
from platform.evaluate import main as evaluate
from platform.generate import main as generate
from tests.harness.disks import small_disk


@pytest.fixture
def refusal(learned, capsys, monkeypatch):
    """Runs a command whose model must not be loaded; returns its line."""

    def load(*arguments, **named):
        raise AssertionError("loaded")

    monkeypatch.setattr(session, "open_initial_weights", load)

    def refused(command, *arguments: str) -> str:
        assert command([str(learned), *arguments]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.isprintable()
        return line

    return refused


@pytest.mark.parametrize("text", ["a\udcff", "\ud800", "x\udfff\ud800"])
def test_a_prompt_that_is_no_text(refusal, text):
    """As bytes of an argument that are no UTF-8 are read."""
    assert "half a character" in refusal(generate, text)


def test_a_file_of_prompts_with_half_a_character(refusal, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\\ud800"}')
    assert "p.jsonl:1: is no text: it has U+D800" in refusal(generate, "--prompts", str(tmp_path / "p.jsonl"))
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a"}\n{"messages": [{"role": "user", "content": [{"text": "bc\\udfff"}]}]}\n'
    )
    line = refusal(generate, "--prompts", str(tmp_path / "p.jsonl"))
    assert line.endswith("p.jsonl:2: is no text: it has U+DFFF, half a character, at place 2")


def test_line_separators_inside_a_text_of_json(learned, tmp_path, capsys):
    """U+2028, U+0085 and the like are legal there; a line of .jsonl ends at a line feed alone."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a\u2028b\x85\x1cc"}, ensure_ascii=False) + "\r\n")
    (tmp_path / "p.txt").write_text("the\u2028plan\r\n")
    for name in ("p.jsonl", "p.txt"):
        out = tmp_path / f"{name}.out"
        assert generate([str(learned), "--prompts", str(tmp_path / name), "--tokens", "1", "--out", str(out)]) == 0
        assert len(out.read_bytes().splitlines()) == 1


def test_prompts_that_are_shown_say_nothing_to_the_terminal(learned, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\\u001b[31m\\nb"}\n{"prompt": "the"}\n')
    assert generate([str(learned), "--prompts", str(tmp_path / "p.jsonl"), "--tokens", "1"]) == 0
    assert "> a\\x1b[31m\\nb\n" in capsys.readouterr().out


def test_damage_beside_a_checkpoint_is_found(learned, tmp_path, capsys):
    """`verify` reads the files that answers need too: a flipped byte, a device in their place, none."""
    shutil.copytree(learned / "checkpoints", tmp_path / "there")
    [name] = [path.name for path in (tmp_path / "there").glob("step-*")]
    assert verify(["verify", str(tmp_path / "there")]) == 0
    assert capsys.readouterr().out.endswith("and tokenizer.json, tokenizer_config.json\n")
    file = tmp_path / "there" / name / "tokenizer.json"
    whole = file.read_bytes()
    file.write_bytes(b"[" + whole[1:])
    assert verify(["verify", str(tmp_path / "there")]) == 1
    file.unlink()
    assert verify(["verify", str(tmp_path / "there")]) == 1
    file.symlink_to("/dev/zero")
    assert verify(["verify", str(tmp_path / "there")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("tokenizer.json" in line for line in lines)


@pytest.mark.parametrize("beams", [10**6, 2**53])
def test_beams_beyond_the_memory(refusal, beams, monkeypatch):
    monkeypatch.setattr(asked_model, "machine_memory", lambda: 10e9)
    line = refusal(generate, "the", "--tokens", "2", "--beams", str(beams))
    assert line.startswith(f"generate: --beams={beams}: needs at least") and "; nearest legal: " in line
    fit = line.rpartition(": ")[2]
    assert 1 < int(fit) < 10**6
    assert refusal(generate, "the", "--beams", str(int(fit) * 2)).startswith("generate: --beams=")


def test_texts_at_a_time_beyond_the_memory(refusal, monkeypatch):
    monkeypatch.setattr(asked_model, "machine_memory", lambda: 10**6)
    assert refusal(generate, *["the"] * 40, "--batch", "40", "--tokens", "2").startswith("generate: --batch=40: needs")


@pytest.mark.parametrize("penalty", ["1e308", "-1e308", "nan", "inf", "11"])
def test_a_power_that_is_no_number(refusal, penalty):
    assert refusal(generate, "the", "--beams", "2", f"--length-penalty={penalty}").startswith(
        "generate: --length-penalty="
    )


@pytest.mark.parametrize("place", ["x" * 300, "/proc/x", "missing/x", "."])
def test_an_output_that_cannot_be_written(refusal, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(generate, "the", "--out", place).startswith("generate: --out=")
    assert refusal(evaluate, "--json", place).startswith("evaluate: --json=")
    assert os.listdir(tmp_path) == []


def test_a_refusal_leaves_no_output(refusal, tmp_path, monkeypatch):
    monkeypatch.setattr(asked_model, "machine_memory", lambda: 10**6)
    refusal(generate, "the", "--beams", "100000", "--out", str(tmp_path / "out"))
    (tmp_path / "table").write_text("before")
    refusal(evaluate, "--json", str(tmp_path / "table"), "--split", "validation", "data.path=/nowhere")
    assert os.listdir(tmp_path) == ["table"] and (tmp_path / "table").read_text() == "before"


def test_a_disk_that_fills_up(tmp_path):
    """Whole lines stay; of the one that did not fit there is nothing, and a table is there as a whole or as before."""
    with small_disk(tmp_path / "small", "64k") as disk:
        with (
            pytest.raises(ConfigError, match="--out=.*cannot be written: No space left"),
            Lines(  # noqa: PT012
                str(disk.path / "out"), "--out"
            ) as lines,
        ):
            lines.append_line("first")
            while True:
                lines.append_line("x" * 3000)
        written = (disk.path / "out").read_text().splitlines()
        assert written[0] == "first" and set(written[1:]) == {"x" * 3000}
        (disk.path / "out").unlink()
        (disk.path / "table").write_text("before")
        table = ReplacedFile(str(disk.path / "table"), "--json")
        with pytest.raises(ConfigError, match="--json=.*cannot be written: No space left"):
            table.write("x" * 100_000)
        assert os.listdir(disk.path) == ["table"] and (disk.path / "table").read_text() == "before"


def test_a_device_is_written_to(capfd):
    ReplacedFile("/dev/stdout", "--json").write("{}\n")
    assert capfd.readouterr().out == "{}\n"
    if not stat.S_ISCHR(os.stat("/dev/full").st_mode):
        pytest.skip("/dev/full is no device here")
    with pytest.raises(ConfigError, match="--json=/dev/full: cannot be written: No space left"):
        ReplacedFile("/dev/full", "--json").write("{}")
