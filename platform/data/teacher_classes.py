"""Classes of a teacher: what a trained model holds for likeliest at every label of a corpus, kept in a file of a run's
directory. The workers score what a run reads once; afterwards a rank reads the records of its labels, and no second
model is there.

The file is a line of JSON, and samples in the order in which they are first read: the number of each, a record for
every token of it (numbers of the likeliest classes, and their log-probabilities), and a SHA-256 of both. It grows at
its end, after an interrupted asking and for a longer run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary import documents, local_files, schema
from platform.boundary.schema import Malformed
from platform.data.streams import PADDING, Ints

FILE = "teacher.bin"
_HEADER = 1 << 16  # bytes of the first line, at most
_HASH = hashlib.sha256().digest_size
_LARGEST = 1 << 40  # classes of a sample


@dataclass(frozen=True)
class TeacherHeader:
    """First line of a file of a teacher's classes: hashes of the corpus's samples and of the teacher's weights,
    temperature, classes per record, and tokens of a sample."""

    samples: str
    teacher: str
    temperature: float
    classes: int
    length: int

    def encode_line(self) -> bytes:
        """Return the first line of a file of a teacher's classes."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @property
    def sample_type(self) -> np.dtype[Any]:
        """Return the type of a sample in the file: its number, its teacher's records, and their hash."""
        return np.dtype([("number", "<i8"), ("records", record_type(self.classes), (self.length,)), ("hash", "V32")])


def record_type(classes: int) -> np.dtype[Any]:
    """Return the type of a record of a teacher: so many classes, and their log-probabilities."""
    return np.dtype([("ids", "<i4", (classes,)), ("logs", "<f4", (classes,))])


def encode_records(numbers: NDArray[np.float64]) -> str:
    """Return a teacher's records in base64, from `numbers` [records, 2 classes]: classes, and log-probabilities."""
    ids, logs = np.split(numbers, 2, 1)
    records = np.empty(len(ids), record_type(ids.shape[1]))
    records["ids"], records["logs"] = ids, np.clip(logs, np.finfo(np.float32).min, 0.0)
    return base64.b64encode(records.tobytes()).decode()


def decode_records(text: str, classes: int) -> NDArray[Any]:
    """Return the records of a teacher that `encode_records` wrote. Raises ValueError for another text."""
    return np.frombuffer(base64.b64decode(text, validate=True), record_type(classes))


def encode_samples(header: TeacherHeader, numbers: Ints, records: NDArray[Any]) -> bytes:
    """Return samples `numbers` as the file has them, of their teacher's records [samples, length]."""
    samples = np.empty(len(numbers), header.sample_type)
    samples["number"], samples["records"] = numbers, records
    samples["hash"] = [_hash_sample(sample) for sample in samples]
    return samples.tobytes()


def _hash_sample(sample: Any) -> bytes:
    """Return the hash of a sample's number and its teacher's records."""
    return hashlib.sha256(sample.tobytes()[:-_HASH]).digest()


def add_samples(path: Path, header: TeacherHeader, kept: int, parts: Iterable[bytes]) -> None:
    """Write samples, in `parts` of `encode_samples`, behind the first `kept` ones of a file of a teacher's classes,
    in place of all others. Raises OSError, and keeps the parts before."""
    if not kept:
        local_files.replace_file(path, [header.encode_line()], durable=True)
    with path.open("r+b") as file:
        file.seek(len(header.encode_line()) + kept * header.sample_type.itemsize)
        file.truncate()
        for part in parts:
            file.write(part)
            file.flush()
        os.fsync(file.fileno())


def read_teacher_header(path: Path) -> tuple[TeacherHeader, int]:
    """Return the header of a file of a teacher's classes, and where its records begin. Raises Malformed, OSError."""
    with path.open("rb") as file:
        line = file.readline(_HEADER)
    return schema.parse_value(TeacherHeader, documents.parse_json(line)), len(line)


def check_file(path: Path, vocab: int) -> tuple[TeacherHeader, Ints]:
    """Read all of a file of a teacher's classes, each of which is below `vocab`; return its header, and the numbers of
    its samples up to the first that is damaged or cut. Raises Malformed for another file, OSError."""
    header, samples = _map_samples(path)
    if not 0 < header.classes <= vocab:
        raise Malformed(f"of {header.classes} classes")
    for place, sample in enumerate(samples):
        ids, logs = sample["records"]["ids"], sample["records"]["logs"]
        if sample["hash"].tobytes() != _hash_sample(sample):
            return header, samples["number"][:place]
        if ids.min() < 0 or ids.max() >= vocab or not np.isfinite(logs).all() or logs.max() > 0:
            raise Malformed("with classes that no model of this vocabulary has")
    return header, np.array(samples["number"])


def _map_samples(path: Path) -> tuple[TeacherHeader, NDArray[Any]]:
    """Return the header of a file of a teacher's classes, and its whole samples, mapped into memory. Raises Malformed,
    OSError."""
    header, start = read_teacher_header(path)
    if header.classes < 1 or header.length < 1 or header.classes * header.length > _LARGEST:
        raise Malformed("damaged")
    count = (path.stat().st_size - start) // header.sample_type.itemsize
    return header, np.memmap(path, header.sample_type, "r", start, (count,)) if count else np.empty(
        0, header.sample_type
    )


@dataclass
class TeacherClasses:
    """Records of a teacher for the labels of a corpus, whose samples have `length` tokens. `samples`: the samples of
    the open file, None without one; `numbers`: their numbers, ascending; `order`: their places in the file."""

    length: int
    samples: NDArray[Any] | None = field(default=None, repr=False)
    numbers: Ints = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    order: Ints = field(default_factory=lambda: np.empty(0, np.int64), repr=False)

    def number_labels(self, samples: Ints, labels: Ints) -> Ints:
        """Return the number of the teacher's record of each label [samples, length] of `samples`, -1 without one."""
        return np.where(labels >= 0, samples[:, None] * self.length + np.arange(labels.shape[1]), PADDING)

    def open_file(self, path: Path) -> None:
        """Open a file of the teacher's classes that another process has checked. Raises Malformed, OSError."""
        header, self.samples = _map_samples(path)
        if header.length != self.length or not len(self.samples):
            raise Malformed(f"{path} is of another corpus")
        numbers = np.array(self.samples["number"])
        self.order = np.argsort(numbers, kind="stable")
        self.numbers = numbers[self.order]

    def read_classes(self, numbers: Ints) -> NDArray[np.float64]:
        """Return classes and log-probabilities [..., 2 classes] of the teacher's records `numbers`, -1: of any."""
        assert self.samples is not None, "the workers are given the file before the first step"
        sample, token = np.divmod(np.where(numbers < 0, self.numbers[0] * self.length, numbers), self.length)
        place = np.minimum(np.searchsorted(self.numbers, sample), len(self.numbers) - 1)
        assert (self.numbers[place] == sample).all(), "the teacher is asked about all that a run reads"
        some = self.samples["records"][self.order[place], token]
        return np.concatenate([some["ids"], some["logs"]], -1, dtype=np.float64)
