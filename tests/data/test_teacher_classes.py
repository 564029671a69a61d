"""The file of a teacher's classes: what is written is read, and damage is seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from platform.boundary.schema import Malformed
from platform.data.teacher_classes import (
    TeacherClasses,
    TeacherHeader,
    check_file,
    decode_records,
    encode_file,
    encode_records,
)

CLASSES, RECORDS, VOCAB = 3, 40, 11
HEADER = TeacherHeader("of samples", "of a teacher", 1.5, CLASSES, RECORDS)


def numbers(draw: np.random.Generator) -> np.ndarray:
    ids = np.stack([draw.permutation(VOCAB)[:CLASSES] for _ in range(RECORDS)])
    return np.concatenate([ids, -draw.random((RECORDS, CLASSES)) * 9], 1)


def written(path: Path, header: TeacherHeader = HEADER) -> np.ndarray:
    rows = numbers(np.random.default_rng(0))
    records = decode_records(encode_records(rows), CLASSES)
    path.write_bytes(b"".join(encode_file(header, np.split(records, [7, 30]))))
    return rows


def test_what_is_written_is_read(tmp_path):
    rows = written(file := tmp_path / "teacher.bin")
    assert check_file(file, VOCAB) == HEADER
    teacher = TeacherClasses(10, {("train", ""): 0, ("validation", "web"): 30}, RECORDS)
    teacher.open_file(file)
    labels = np.array([[4, -1, 5, 6, 7, 8, 9, 1, 2, 3]])
    places = teacher.number_labels("validation", "web", np.array([0]), labels)
    assert places.tolist() == [[30, -1, *range(32, 40)]]
    assert np.allclose(teacher.read_classes(places)[0, 2:], rows[32:], rtol=1e-7)
    assert teacher.read_classes(places).shape == (1, 10, 2 * CLASSES)


def test_a_probability_of_nothing_is_finite():
    records = decode_records(encode_records(np.array([[0.0, 1.0, 1e-9, -np.inf]])), 2)
    assert records["logs"][0, 0] == 0 and np.isfinite(records["logs"]).all()


def test_damage_is_seen(tmp_path):
    """Any byte of the file, cut at any place, and longer than it was."""
    written(file := tmp_path / "teacher.bin")
    whole, draw = file.read_bytes(), np.random.default_rng(1)
    spoiled = [whole[:-1], whole + b"x", whole[:40], b"", b"\n" * 5, whole[:-32]]
    for place in draw.integers(0, len(whole), 60):
        spoiled.append(whole[:place] + bytes([whole[place] ^ (1 << draw.integers(8))]) + whole[place + 1 :])
    for raw in spoiled:
        file.write_bytes(raw)
        with pytest.raises((Malformed, ValueError)):
            check_file(file, VOCAB)


@pytest.mark.parametrize("vocab, why", [(CLASSES - 1, "damaged"), (VOCAB - 2, "no model of this vocabulary")])
def test_classes_of_another_vocabulary(tmp_path, vocab, why):
    written(file := tmp_path / "teacher.bin")
    with pytest.raises(Malformed, match=why):
        check_file(file, vocab)


def test_another_corpus(tmp_path):
    written(file := tmp_path / "teacher.bin")
    with pytest.raises(Malformed, match="another corpus"):
        TeacherClasses(10, {}, RECORDS + 1).open_file(file)
