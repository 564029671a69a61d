"""Classes of a teacher: what a trained model holds for likeliest at every label of a corpus, kept in a file of a run's
directory. The workers score the corpus once; afterwards a rank reads the records of its labels, and no second model is
there.

The file is a line of JSON, a record for every token of every sample (numbers of the likeliest classes, and their
log-probabilities), and a SHA-256 of all before it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary import documents, schema
from platform.boundary.schema import Malformed
from platform.data.streams import PADDING, Ints

FILE = "teacher.bin"
_HEADER = 1 << 16  # bytes of the first line, at most
_HASH = hashlib.sha256().digest_size
_AT_ONCE = 1 << 24  # bytes of the file that are hashed at once


@dataclass(frozen=True)
class TeacherHeader:
    """First line of a file of a teacher's classes: hashes of the corpus's samples and of the teacher's weights,
    temperature, classes per record, and the number of records."""

    samples: str
    teacher: str
    temperature: float
    classes: int
    records: int


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


def encode_file(header: TeacherHeader, records: Iterable[NDArray[Any]]) -> Iterator[bytes]:
    """Yield the file of a teacher's classes, in parts, from its records, in parts."""
    digest = hashlib.sha256()
    for part in chain([json.dumps(asdict(header)).encode() + b"\n"], (some.tobytes() for some in records)):
        digest.update(part)
        yield part
    yield digest.digest()


def read_teacher_header(path: Path) -> tuple[TeacherHeader, int]:
    """Return the header of a file of a teacher's classes, and where its records begin. Raises Malformed, OSError."""
    with path.open("rb") as file:
        line = file.readline(_HEADER)
    return schema.parse_value(TeacherHeader, documents.parse_json(line)), len(line)


def check_file(path: Path, vocab: int) -> TeacherHeader:
    """Read all of a file of a teacher's classes, each of which is below `vocab`; return its header. Raises Malformed if
    it is damaged, OSError."""
    header, start = read_teacher_header(path)
    end = start + header.records * record_type(header.classes).itemsize
    if not 0 < header.classes <= vocab or path.stat().st_size != end + _HASH:
        raise Malformed("damaged")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for first in range(0, end, _AT_ONCE):
            digest.update(file.read(min(_AT_ONCE, end - first)))
        if file.read() != digest.digest():
            raise Malformed("damaged")
    records = _map_records(path, header, start)
    for first in range(0, len(records), step := max(1, _AT_ONCE // records.itemsize)):
        ids, logs = (records[first : first + step][name] for name in ("ids", "logs"))
        if ids.min() < 0 or ids.max() >= vocab or not np.isfinite(logs).all() or logs.max() > 0:
            raise Malformed("with classes that no model of this vocabulary has")
    return header


def _map_records(path: Path, header: TeacherHeader, start: int) -> NDArray[Any]:
    """Return the records of a file of a teacher's classes, mapped into memory. Raises OSError, ValueError."""
    return np.memmap(path, record_type(header.classes), "r", start, (header.records,))


@dataclass
class TeacherClasses:
    """Records of a teacher for the labels of a corpus, whose samples have `length` tokens. `first_records`: number of
    each stream's first record, by split and source; `count`: number of all; `records`: None until a file is opened."""

    length: int
    first_records: Mapping[tuple[str, str], int]
    count: int
    records: NDArray[Any] | None = field(default=None, repr=False)

    def number_labels(self, split: str, source: str, index: Ints, labels: Ints) -> Ints:
        """Return the number of the teacher's record of each label in samples `index` of a stream, -1 without one."""
        first = self.first_records[split, source] + index[:, None] * self.length
        return np.where(labels >= 0, first + np.arange(labels.shape[1]), PADDING)

    def open_file(self, path: Path) -> None:
        """Open a file of the teacher's classes that another process has checked. Raises Malformed, OSError."""
        header, start = read_teacher_header(path)
        if header.records != self.count:
            raise Malformed(f"{path} is of another corpus")
        self.records = _map_records(path, header, start)

    def read_classes(self, numbers: Ints) -> NDArray[np.float64]:
        """Return classes and log-probabilities [..., 2 classes] of the teacher's records `numbers`, -1: of any."""
        assert self.records is not None, "the workers are given the file before the first step"
        some = self.records[np.maximum(numbers, 0)]
        return np.concatenate([some["ids"], some["logs"]], -1, dtype=np.float64)
