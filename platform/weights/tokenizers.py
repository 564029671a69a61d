"""Files of a tokenizer that go with an exported model: those of another model, or of the corpus of its run."""

from __future__ import annotations

import json
from pathlib import Path

from platform.checkpoint.storage.storage import Storage, open_storage
from platform.config.fields import ConfigError, violation
from platform.data.corpus import tokenizer_of

LARGEST = 256 << 20  # bytes of a file
FILES = (
    "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "sentencepiece.bpe.model",
    "special_tokens_map.json", "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "vocab.json", "vocab.txt",
)  # fmt: skip
_OWN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def tokenizer_files(source: str, corpus: str, length: int) -> dict[str, bytes]:
    """Return the files of a tokenizer, by name: all that a folder `source` has of them, or a tokenizer.json; without a
    source, that of the `corpus` (by its hash) of a run, from this machine's cache, {} if it is not there. `length`: the
    most tokens of the model. Raises ConfigError if the source has none."""
    if source and not source.endswith(".json"):
        return _copied(open_storage(source, "--tokenizer"), source)
    found = Path(source) if source else tokenizer_of(corpus)
    if found is None:
        return {}
    if not found.is_file():
        raise ConfigError(violation("--tokenizer", source, "no such file"))
    described = {**_OWN, "model_max_length": length}
    return {
        "tokenizer.json": found.read_bytes(),
        "tokenizer_config.json": (json.dumps(described, indent=2) + "\n").encode(),
    }


def _copied(folder: Storage, source: str) -> dict[str, bytes]:
    there = folder.list("")
    if large := [name for name in FILES if there.get(name, 0) > LARGEST]:
        raise ConfigError(violation("--tokenizer", source, f"{large[0]} has more than {LARGEST} bytes"))
    found = {name: bytes(folder.read(name)) for name in FILES if name in there}
    if not any(name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece")) for name in found):
        raise ConfigError(violation("--tokenizer", source, f"holds none of {', '.join(FILES)}"))
    return found
