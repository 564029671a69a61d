"""Files beside a model's weights: its tokenizer, which data has to share, and how text is generated from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from platform.boundary.files.file_storage import Storage
from platform.boundary.redaction import bare_url
from platform.boundary.refusals import ConfigError, as_refusal, violation
from platform.boundary.schema import Malformed
from platform.checkpoint.storage import catalogue
from platform.checkpoint.storage.carried import read_carried
from platform.checkpoint.storage.manifest import Manifest, Refused
from platform.config.fields import Data, Model
from platform.data.tokenizers.confined_tokenizer import ConfinedTokenizer
from platform.data.tokenizers.tokenizer_files import (
    CONFIG,
    JSON,
    has_tokenizer,
    json_of,
    read_files,
)
from platform.data.vocabulary import OWN, Vocabulary, vocabulary_of
from platform.weights.folder import SavedModel, is_saved

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENERATION = "generation_config.json"
_ROLES = ("bos", "eos", "pad")


def beside(saved: SavedModel, key: str) -> tuple[dict[str, bytes], str]:
    """Read the files beside a model that transformers saved (its tokenizer, generation_config.json), name -> bytes,
    and why the tokenizer is not among them, "" if it is. `key`: the configuration key or argument that names the
    model."""
    found: dict[str, bytes] = {}
    if raw := saved.small(GENERATION):
        found[GENERATION] = raw
    if not has_tokenizer(saved.place):
        return found, "there is none beside it"
    try:
        return {**found, **read_files(saved.place, key=key)}, ""
    except ConfigError as error:
        return found, error.violations[0]


def to_export(source: str, storage: Storage, directory: str, manifest: Manifest, length: int) -> dict[str, bytes]:
    """Read the files that go along with an exported checkpoint, by name: the tokenizer's at `source`, a path
    or URL of its file or folder, else the ones that the checkpoint carries. `length`: the most tokens of the model.
    Raises ConfigError, Refused or OSError."""
    carried = read_carried(storage, directory, manifest)
    if not source:
        found = carried
    else:
        found = read_files(source, key="--tokenizer")
        found |= {GENERATION: carried[GENERATION]} if GENERATION in carried else {}
    with as_refusal("--tokenizer", source, Malformed):
        if JSON in found and json_of(found, CONFIG) == OWN:  # trained here: it knows no longest text
            described = json.dumps({**OWN, "model_max_length": length}, indent=2) + "\n"
            return {**found, CONFIG: described.encode()}
    return found


def vocabulary_in(files: Mapping[str, bytes]) -> Vocabulary | None:
    """Return the vocabulary of the tokenizer in the `files` beside a model's weights; None if none is readable."""
    try:
        return vocabulary_of(files) if JSON in files else None
    except Malformed:
        return None


def token_ids(vocabulary: Vocabulary | None, model: Model) -> dict[str, Any]:
    """Return the keys of an exported model's config.json with the ids that begin, end and pad texts."""
    if vocabulary is None:
        return {}
    start = {"decoder_start_token_id": vocabulary.special.start} if model.kind == "encoder_decoder" else {}
    tokens = {role: vocabulary.named[role] for role in _ROLES if role in vocabulary.named}
    return start | {f"{role}_token_id": vocabulary.tokenizer.token_to_id(token) for role, token in tokens.items()}


def files_beside(url: str) -> tuple[str, dict[str, bytes]]:
    """Return where the weights at a URL, of a model that transformers saved or of a checkpoint, have files beside them,
    and these files by name; {} if there are no weights. Raises Refused or OSError if a checkpoint's files are not what
    was written."""
    try:
        if is_saved(url):
            saved = SavedModel(url)
            return saved.place, beside(saved, "source")[0]
        storage, name, manifest = catalogue.select(url, "source")
    except (ConfigError, Refused, OSError):
        return url, {}
    return f"{storage.url}/{name}", read_carried(storage, name, manifest)


def check_tokenizer(data: Data, given: Vocabulary | None, place: str, files: Mapping[str, bytes]) -> None:
    """Raise ConfigError if the tokenizer of the data, None if the data has none, differs from that beside a model's
    weights, among the `files` at `place`: the model would read other tokens than it knows. data.foreign_tokenizer=true
    allows it."""
    if given is None or JSON not in files or data.foreign_tokenizer or given.files.get(JSON) == files[JSON]:
        return
    try:
        known = ConfinedTokenizer(files[JSON])
    except Malformed:
        return
    others, count = _otherwise(known, given.tokenizer)
    if others:
        reason = f"is not that of the weights in {bare_url(place)}: {others} of its {count} tokens have other ids here"
        legal = [f"data.tokenizer={bare_url(place)}", "data.foreign_tokenizer=true"]
        raise ConfigError(violation("data.tokenizer", bare_url(data.tokenizer), reason, legal))


def _otherwise(known: ConfinedTokenizer, here: Tokenizer | ConfinedTokenizer) -> tuple[int, int]:
    """Compare a model's tokenizer (`known`) with the data's: (tokens that differ, tokens), without special ones."""
    special = known.get_added_tokens_decoder()
    tokens = {token: i for token, i in known.get_vocab().items() if i not in special}
    there = here.get_vocab()
    return sum(there.get(token) != i for token, i in tokens.items()), len(tokens)
