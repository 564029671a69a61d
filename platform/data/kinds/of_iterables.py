"""Tokens of documents that a function of the user's own yields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from platform.config.fields import ConfigError, Data, violation
from platform.data.kinds.of_documents import Form, splits_of, write_documents
from platform.data.kinds.of_texts import encode_texts
from platform.data.kinds.of_tokens import encode_tokens
from platform.data.kinds.source_kind import SourceKind, checked
from platform.data.sources import iterables
from platform.data.sources.data_files import DataFile
from platform.data.vocabulary import Vocabulary

TEXT = Form(iterables.read_own, encode_texts, texts=lambda text: [text])
TOKENS = Form(iterables.read_own, encode_tokens, starts=True)


def _check(data: Data) -> list[str]:
    """Return one refusal line per mistake that the first document of the user's function shows."""
    if data.validation_path:
        return [
            violation("data.validation_path", data.validation_path, f"data.kind={data.kind} reads no files", ['""'])
        ]
    return checked(lambda data: next(iterables.read_own([], data), None), data)


def _decisive(data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return what decides which documents they are: all of them."""
    return ["own", iterables.digest_of(data)]


def _write(form: Form) -> Any:
    """Return the function that builds the entry of documents of this form. It raises ConfigError if the last pass over
    them gave others than the first."""

    def write(
        folder: Path, files: Sequence[DataFile], data: Data, vocab: int, given: Vocabulary | None
    ) -> dict[str, Any]:
        before = iterables.digest_of(data)
        found = write_documents(form, folder, files, data, vocab, given)
        if iterables.digest_of(data) != before:
            raise ConfigError(f"data.kind={data.kind}: gives other documents every time; give the same, in one order")
        return found

    return write


OWN_TEXTS = SourceKind(
    find=lambda data: [],
    check=_check,
    decisive=_decisive,
    write=_write(TEXT),
    texts=lambda files, data: splits_of(TEXT, files, data).texts(),
    form=TEXT,
)
OWN_TOKENS = replace(OWN_TEXTS, write=_write(TOKENS), texts=None, form=TOKENS)
