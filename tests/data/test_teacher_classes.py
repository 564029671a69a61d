"""The file of a teacher's classes: what is written is read, and damage is seen."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from platform.boundary.schema import Malformed
from platform.config.groups import Data
from platform.data.corpus import open_corpus
from platform.data.teacher_classes import (
    TeacherClasses,
    TeacherHeader,
    add_samples,
    check_file,
    decode_records,
    encode_records,
    encode_samples,
)

CLASSES, LENGTH, VOCAB = 3, 5, 11
HEADER = TeacherHeader("of samples", "of a teacher", 1.5, CLASSES, LENGTH)
SAMPLES = np.array([4, 9, 0, 7, 2, 30])  # in the order in which a run reads them


def rows_of(count: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    ids = np.stack([draw.permutation(VOCAB)[:CLASSES] for _ in range(count * LENGTH)])
    return np.concatenate([ids, -draw.random((count * LENGTH, CLASSES)) * 9], 1)


def written(path: Path, header: TeacherHeader = HEADER, kept: int = 0) -> np.ndarray:
    """A file of `SAMPLES` of which the first `kept` are there already; the rows of all."""
    rows = rows_of(len(SAMPLES))
    records = decode_records(encode_records(rows), CLASSES).reshape(-1, LENGTH)
    parts = (encode_samples(header, SAMPLES[i : i + 2], records[i : i + 2]) for i in range(kept, len(SAMPLES), 2))
    add_samples(path, header, kept, parts)
    return rows.reshape(-1, LENGTH, 2 * CLASSES)


def test_what_is_written_is_read(tmp_path):
    rows = written(file := tmp_path / "teacher.bin")
    header, numbers = check_file(file, VOCAB)
    assert header == HEADER and np.array_equal(numbers, SAMPLES)
    teacher = TeacherClasses(LENGTH)
    teacher.open_file(file)
    places = teacher.number_labels(np.array([9, 2]), np.array([[4, -1, 5, 6, 7], [1, 2, 3, 4, 5]]))
    assert places.tolist() == [[45, -1, 47, 48, 49], [*range(10, 15)]]
    read = teacher.read_classes(places)
    assert read.shape == (2, LENGTH, 2 * CLASSES)
    assert np.allclose(read[0, 2:], rows[1, 2:], rtol=1e-7) and np.allclose(read[1], rows[4], rtol=1e-7)
    with pytest.raises(AssertionError, match="all that a run reads"):
        teacher.read_classes(np.array([[8 * LENGTH]]))


def test_a_probability_of_nothing_is_finite():
    records = decode_records(encode_records(np.array([[0.0, 1.0, 1e-9, -np.inf]])), 2)
    assert records["logs"][0, 0] == 0 and np.isfinite(records["logs"]).all()


def test_damage_is_seen_and_what_is_before_it_is_kept(tmp_path):
    """Any byte of the file, and cut at any place; then the rest is written again."""
    written(file := tmp_path / "teacher.bin")
    whole, draw = file.read_bytes(), np.random.default_rng(1)
    start, size = len(HEADER.encode_line()), HEADER.sample_type.itemsize
    for place in draw.integers(start, len(whole), 60).tolist():
        flipped = whole[:place] + bytes([whole[place] ^ (1 << draw.integers(8))]) + whole[place + 1 :]
        for raw in (flipped, whole[:place]):
            file.write_bytes(raw)
            _, numbers = check_file(file, VOCAB)
            assert numbers.tolist() == SAMPLES[: (place - start) // size].tolist()
            written(file, kept=len(numbers) // 2 * 2)
            assert file.read_bytes() == whole
    for place in range(start):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << draw.integers(8))]) + whole[place + 1 :])
        with suppress(Malformed, ValueError):
            assert check_file(file, VOCAB)[0] != HEADER


def test_an_interrupted_asking_leaves_what_it_has(tmp_path):
    def parts():
        yield encode_samples(HEADER, SAMPLES[:1], decode_records(encode_records(rows_of(1)), CLASSES)[None])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_samples(file := tmp_path / "teacher.bin", HEADER, 0, parts())
    assert check_file(file, VOCAB)[1].tolist() == SAMPLES[:1].tolist()


@pytest.mark.parametrize("vocab, why", [(CLASSES - 1, "of 3 classes"), (VOCAB - 2, "no model of this vocabulary")])
def test_classes_of_another_vocabulary(tmp_path, vocab, why):
    written(file := tmp_path / "teacher.bin")
    with pytest.raises(Malformed, match=why):
        check_file(file, vocab)


def test_another_corpus(tmp_path):
    written(file := tmp_path / "teacher.bin")
    with pytest.raises(Malformed, match="another corpus"):
        TeacherClasses(LENGTH + 1).open_file(file)


@pytest.mark.parametrize("seed", range(8))
def test_samples_are_listed_as_they_are_read(tmp_path, seed):
    """Of mixtures, over epochs and held-out splits: the numbers of `batch`, each once; and no others."""
    draw = np.random.default_rng(seed)
    for name in ("a", "b"):
        words = " ".join(f"{name}{i}" for i in range(draw.integers(150, 600)))
        (tmp_path / name).write_text("\n\n".join(words[i : i + 90] for i in range(0, len(words), 90)))
    sources = {name: {"path": str(tmp_path / name), "weight": float(draw.integers(1, 5))} for name in ("a", "b")}
    data = Data(kind="mixture", sources=sources, validation=0.3, cache=str(tmp_path / "cache"))
    corpus = replace(open_corpus(data, length=16, vocab=280, seed=seed), teacher=TeacherClasses(16))
    ranges = [("train", 0, 7), ("validation/b", 0, 2), ("train", 7, int(draw.integers(8, 300)))]
    expected: dict[int, None] = {}
    for split, start, end in ranges:
        for sample in range(start, end):
            numbers = corpus.batch(split, sample, sample + 1)["teacher"]
            expected[int(numbers[numbers >= 0][0]) // 16] = None
    assert corpus.list_read_samples(ranges).tolist() == list(expected)
