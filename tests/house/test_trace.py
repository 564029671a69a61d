"""The tracer of walks: what is a value, who makes it, who hands it on, and where a walk begins and ends."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch

from platform.boundary.local_files import LocalStorage
from platform.boundary.sealed_blocks import FileRange, hash_blocks
from platform.config.groups import Optimizer
from platform.optimizer.learning_rate import learning_rate
from tests.house.trace import ARRAY, PACKED, Hasher, Tracer
from tests.house.walk_steps import Notes, cut_notes, end_notes, keep_differences, list_steps, read_notes


@dataclass(frozen=True)
class Pair:
    name: str
    number: float


def build_notes(*lines: str, kinds: dict[str, str] | None = None) -> Notes:
    """Return the notes of lines `FILE NAME VALUE`, one after the other."""
    times = {tuple(line.split()): float(at) for at, line in enumerate(lines)}
    return Notes(times, kinds or {})  # type: ignore[arg-type]


def test_equal_content_is_an_equal_value():
    one, other = Hasher(), Hasher()
    for value in ("text", 1.5, [1, 2], Pair("a", 1.0), {"a": Pair("b", 2.0)}, torch.arange(3)):
        assert one.hash_value(value)[0] == other.hash_value(value)[0] != ""
    assert one.hash_value(Pair("a", 1.0))[0] != one.hash_value(Pair("a", 2.0))[0]
    assert one.hash_value(torch.arange(3))[0] != one.hash_value(torch.arange(4))[0]
    assert one.hash_value(None)[0] == one.hash_value(object())[0] == ""


def test_a_value_has_all_its_parts():
    hasher = Hasher()
    whole, every = hasher.hash_value({"key": [Pair("a", 1.0)]})
    assert {whole, hasher.hash_value("a")[0], hasher.hash_value(Pair("a", 1.0))[0]} <= every


def test_lists_of_values_are_packed_and_lists_of_numbers_are_not():
    hasher = Hasher()
    kinds = {name: hasher.kinds.get(hasher.hash_value(value)[0]) for name, value in {
        "numbers": [1, 2], "texts": ["a"], "tensor": torch.arange(3), "bytes": b"abc", "pair": Pair("a", 1.0),
    }.items()}  # fmt: skip
    assert kinds == {"numbers": None, "texts": PACKED, "tensor": ARRAY, "bytes": ARRAY, "pair": None}


def test_what_only_this_beginning_leads_to_is_a_step():
    run = build_notes(
        "a.py f 1", "a.py f clock", "b.py g 2", "b.py g same", "c.py h 2", "c.py h list", kinds={"list": PACKED}
    )
    again = build_notes("a.py f 1", "b.py g 2", "b.py g same", "c.py h 2", "c.py h list")
    other = build_notes("a.py f 9", "b.py g 8", "b.py g same")
    assert [tuple(step) for step in list_steps(keep_differences(run, again, other))] == [
        ("a.py", "f", True),
        ("b.py", "g", True),
        ("c.py", "h", False),  # it hands on the value of g, and packs it
    ]


def test_arrays_can_be_followed_alone():
    run = build_notes("a.py f text", "b.py f bytes", kinds={"bytes": ARRAY})
    assert [step.file for step in list_steps(run)] == ["a.py", "b.py"]
    assert [step.file for step in list_steps(run, arrays=True)] == ["b.py"]
    assert [step.file for step in list_steps(run, arrays=False)] == ["a.py"]


def test_a_walk_lies_between_its_beginning_and_its_end():
    notes = build_notes("end f 0", "early f 0", "start f 1", "middle f 2", "end f 3", "late f 4", "end f 5", "last f 6")
    assert [file for file, _, _ in cut_notes(notes, "start:f", "end:f", notes).times] == ["start", "middle", "end"]
    without_end = keep_differences(notes, notes, build_notes("end f 0", "end f 3", "end f 5"))
    assert [file for file, _, _ in cut_notes(without_end, "start:f", "end:f", notes).times] == ["start", "middle"]
    assert [file for file, _, _ in end_notes(notes, "end:f").times][-2:] == ["late", "end"]
    for start, end in (("start:f", "gone:f"), ("gone:f", "end:f")):
        with pytest.raises(LookupError, match="gone"):
            cut_notes(notes, start, end, notes)


def test_a_line_that_a_killed_process_left_unfinished_is_none(tmp_path):
    (tmp_path / "1.jsonl").write_text(json.dumps([2.0, "a.py", "f", {"1": "", "2": ARRAY}, ["2"]]) + '\n[3.0, "b.')
    (tmp_path / "2.jsonl").write_text(json.dumps([1.0, "a.py", "f", {"1": ""}, []]) + "\n")
    times = {("a.py", "f", "1"): 1.0, ("a.py", "f", "2"): 2.0}
    assert read_notes(tmp_path) == Notes(times, {"2": ARRAY}, frozenset([("a.py", "f", "2")]))


def test_a_call_in_platform_is_noted(tmp_path):
    with Tracer(tmp_path):
        rate = learning_rate(Optimizer(lr=0.5, warmup_steps=4), 1, 8)
    notes, file = read_notes(tmp_path), "platform/optimizer/learning_rate.py"
    assert (file, "learning_rate", Hasher().hash_value(rate)[0]) in notes.times
    assert not notes.arrived


def test_what_a_call_writes_into_memory_arrives(tmp_path):
    (tmp_path / "blocks").write_bytes(bytes(range(8)))
    memory = torch.zeros(8, dtype=torch.uint8)
    with Tracer(tmp_path):
        list(hash_blocks(LocalStorage(tmp_path), [FileRange("blocks", 0, 8)], [memory.numpy().data]))
    notes, value = read_notes(tmp_path), Hasher().hash_value(torch.arange(8, dtype=torch.uint8))[0]
    writers = {name for _, name, hashed in notes.arrived if hashed == value}
    assert writers == {"_hash_next_block"}  # the innermost alone: those that called it hand it on
    assert [step for step in list_steps(notes) if step.name == "_hash_next_block"][0].makes
