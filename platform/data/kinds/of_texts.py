"""Tokens of documents of text, from files or from a function of the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from platform.config.fields import Data
from platform.data import tokenizer
from platform.data.kinds.of_documents import Documents, Encoded, Form, splits_of, write_documents
from platform.data.kinds.source_kind import SourceKind, checked, contents, held_files
from platform.data.sources import texts
from platform.data.sources.data_files import DataFile
from platform.data.vocabulary import Vocabulary


def encode_texts(vocabulary: Vocabulary | None, pieces: Documents, characters: int) -> Iterator[Encoded]:
    """Encode pieces of texts, as `platform.data.tokenizer.encode_documents` does."""
    assert vocabulary
    return map(Encoded, tokenizer.encode_documents(vocabulary, pieces, characters))


def deciding(data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return what decides which documents files hold: their formats and contents, and the field."""
    others = held_files(data)
    return [contents(files), data.field, *([contents(others)] if others else [])]


def _check(data: Data) -> list[str]:
    return texts.check_files(data) + checked(held_files, data)


TEXT = Form(texts.read_documents, encode_texts, texts=lambda piece: [piece])
TEXTS = SourceKind(
    find=texts.files_of,
    check=_check,
    decisive=deciding,
    write=partial(write_documents, TEXT),
    texts=lambda files, data: splits_of(TEXT, files, data).texts(),
    form=TEXT,
)
