"""Source of documents that a function of the user's own yields: texts, or lists of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary.own_code import READING, OwnCodeError, own_code
from platform.boundary.refusals import ConfigError, violation
from platform.config.extending.own_settings import admit, with_settings
from platform.config.fields import Data
from platform.data.reading.data_files import DataFile, encodable
from platform.data.sources.source_kind import KINDS, SourceKind
from platform.data.sources.stream_blocks import is_streamed
from platform.data.sources.texts import encode_texts
from platform.data.sources.token_files import encode_tokens
from platform.data.vocabulary import Vocabulary

_NO_MORE = object()


def register_documents(
    name: str, read: Callable[..., Iterable[Any]], *, tokens: bool = False, settings: type | None = None
) -> None:
    """Register a user's function as the data source `data.kind=NAME`: `read`, given the keys of group data, returns an
    iterable of documents: texts or, with `tokens`, sequences of token ids. It is called anew for every pass over them,
    and must then give the same documents in the same order. `settings`: a dataclass of data.settings, which `read` gets
    as `settings`."""
    admit("data.kind", name, settings, read)
    documents = partial(read_own, read, _tokens if tokens else _text)
    texts = None if tokens else lambda text: [text]
    encode = encode_tokens if tokens else encode_texts
    KINDS[name] = OwnKind(lambda data: [], documents, encode, partial(_content, documents), texts, starts=tokens)


def read_own(
    read: Callable[..., Iterable[Any]],
    convert: Callable[[Any, Data, int], Any],
    files: Sequence[DataFile],
    data: Data,
    key: str = "data.path",
) -> Iterator[tuple[int, str | NDArray[np.int64]]]:
    """Yield (number, text or token ids) of each document that the user's function `read` gives, converted and checked
    by `convert`; empty ones are left out. Raises ConfigError, naming the function and the document, for any error that
    it raises, and for a value that is no document."""
    number, place = 0, 0
    with _reading(data):
        documents = iter(with_settings(read, "data.kind", data.kind, data.settings)(data))
    while True:
        with _reading(data, f", for document {place}"):
            document = next(documents, _NO_MORE)
        if document is _NO_MORE:
            return
        found = convert(document, data, place)
        place += 1
        if len(found):
            yield number, found
            number += 1


def _content(read: Callable[..., Iterable[Any]], data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return ["own", SHA-256 of all documents that the user's function gives], which names their cache entry."""
    digest = hashlib.sha256()
    for _, document in read(files, data):
        raw = document.encode() if isinstance(document, str) else document.astype("<i8").tobytes()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return ["own", digest.hexdigest()]


def _text(document: Any, data: Data, place: int) -> str:
    """Return a document that the user's data source gives as text. Raises ConfigError, with its number, if not."""
    if isinstance(document, str):
        return encodable(document)
    raise ConfigError(f"data.kind={data.kind}: document {place} is a {type(document).__name__}, not a text")


def _tokens(document: Any, data: Data, place: int) -> NDArray[np.int64]:
    """Return a document that the user's data source gives as token ids. Raises ConfigError if it is no list of them."""
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
    """Raise ConfigError, naming data.kind and `which` document, in place of an error of the user's data source."""
    name = f"data.kind={data.kind}"
    try:
        with own_code(name, (ConfigError, OSError), READING):
            yield
    except OwnCodeError as error:
        raise ConfigError(f"{name}: {error}{which}") from error


class OwnKind(SourceKind):
    """Kind of source of a user's function that yields documents, and reads no files of ours."""

    def parts(self, files: Sequence[DataFile]) -> list[Sequence[DataFile]]:
        """Return a single empty group of files, as the user's function gives all documents at once, without files."""
        return [[]]

    def held(self, data: Data) -> list[DataFile]:
        """Return no files to hold out, as the user's data source has none. Raises ConfigError if some are named."""
        if data.validation_path:
            reason = f"data.kind={data.kind} reads no files"
            raise ConfigError(violation("data.validation_path", data.validation_path, reason, ['""']))
        return []

    def write_entry(
        self, folder: Path, files: Sequence[DataFile], data: Data, vocab: int, given: Vocabulary | None
    ) -> dict[str, Any]:
        """Build the cache entry of the documents that the user's function gives; return its description. Raises
        ConfigError if two passes over the documents differ."""
        whole = not is_streamed(data)
        before = whole and self.content(data, files)
        found = super().write_entry(folder, files, data, vocab, given)
        if (whole and self.content(data, files)) != before:
            raise ConfigError(f"data.kind={data.kind}: gives other documents every time; give the same, in one order")
        return found
