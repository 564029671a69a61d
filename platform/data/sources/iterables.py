"""Documents that a function of the user's own yields: texts, or tokens that exist."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary.own_code import READING, OwnCodeError, own_code
from platform.config.bounds import allow
from platform.config.fields import ConfigError, Data
from platform.data.sources.data_files import DataFile, encodable

_Read = Callable[[Data], Iterable[Any]]
TEXTS: dict[str, _Read] = {}  # by data.kind: functions that yield texts
TOKENS: dict[str, _Read] = {}  # and those that yield lists of tokens
_NO_MORE = object()


def register_documents(name: str, read: Callable[[Data], Iterable[Any]], *, tokens: bool = False) -> None:
    """Register documents as `data.kind=NAME`: `read`, given the keys of group data, returns an iterable of texts, or,
    with `tokens`, of sequences of token ids. It is called anew for every pass over them, and must then give the same
    documents in the same order."""
    allow("data.kind", name, read)
    (TOKENS if tokens else TEXTS)[name] = read


def read_own(
    files: Sequence[DataFile], data: Data, key: str = "data.path"
) -> Iterator[tuple[int, str | NDArray[np.int64]]]:
    """Yield (number, text or tokens) of each document of the user's function `data.kind`; empty ones are left out.
    Raises ConfigError, naming it and the document, for any error that it raises, and for what is no document."""
    number, place = 0, 0
    with _reading(data):
        documents = iter((TOKENS.get(data.kind) or TEXTS[data.kind])(data))
    while True:
        with _reading(data, f", for document {place}"):
            document = next(documents, _NO_MORE)
        if document is _NO_MORE:
            return
        found = _tokens(document, data, place) if data.kind in TOKENS else _text(document, data, place)
        place += 1
        if len(found):
            yield number, found
            number += 1


def digest_of(data: Data) -> str:
    """Return the SHA-256 of all documents of the user's function `data.kind`."""
    digest = hashlib.sha256()
    for _, document in read_own([], data):
        raw = document.encode() if isinstance(document, str) else document.astype("<i8").tobytes()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def _text(document: Any, data: Data, place: int) -> str:
    """Return a document as text. Raises ConfigError if it is none."""
    if isinstance(document, str):
        return encodable(document)
    raise ConfigError(f"data.kind={data.kind}: document {place} is a {type(document).__name__}, not a text")


def _tokens(document: Any, data: Data, place: int) -> NDArray[np.int64]:
    """Return a document as token ids. Raises ConfigError if it is none."""
    try:
        found = np.asarray(document)
    except (TypeError, ValueError):
        found = np.zeros((1, 1))
    if found.ndim != 1 or (len(found) and (found.dtype.kind not in "iu" or int(found.min()) < 0)):
        raise ConfigError(f"data.kind={data.kind}: document {place} is no list of token ids")
    if len(found) and int(found.max()) >= 1 << 31:
        raise ConfigError(f"data.kind={data.kind}: document {place} has token {found.max()}")
    return found.astype(np.int64)


@contextmanager
def _reading(data: Data, which: str = "") -> Iterator[None]:
    """Raise ConfigError, naming the user's function `data.kind`, in place of what it raises within the context; `which`
    document was asked for."""
    name = f"data.kind={data.kind}"
    try:
        with own_code(name, (ConfigError, OSError), READING):
            yield
    except OwnCodeError as error:
        raise ConfigError(f"{name}: {error}{which}") from error
