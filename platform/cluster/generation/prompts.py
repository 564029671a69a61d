"""Prompts: texts, conversations or token ids that a model is to continue, as it reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platform.boundary import documents
from platform.boundary.refusals import ConfigError, as_refusal, violation
from platform.boundary.schema import Malformed
from platform.config.fields import Model
from platform.data.vocabulary import Vocabulary
from platform.plan.language.numbers import count_of

LARGEST = 1 << 28  # bytes of a file of prompts
KINDS = ("prompt", "messages", "ids")  # fields of a line of .jsonl, one of which says what is to be continued
_IDS = 1 << 53  # no model has as many
_TURNS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")  # that end a message of a conversation


@dataclass(frozen=True)
class Prompt:
    """Prompt as it was given: one of a text, a conversation (`messages`) and token ids, under its name in `given`.
    `where`: a name of it for refusals."""

    given: Mapping[str, Any]
    where: str


def read_prompts(path: str) -> list[Prompt]:
    """Read the prompts that a model is to continue from a file: one per line of text, or per object of .jsonl, by
    `prompt`, `messages` or `ids`. Raises ConfigError, naming the line."""
    try:
        text = documents.read_bytes(Path(path), LARGEST).decode()
    except (OSError, Malformed, UnicodeDecodeError) as error:
        raise ConfigError(violation("--prompts", path, f"cannot be read: {documents.one_line(error)}")) from None
    lines = [(n, line.removesuffix("\r")) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(violation("--prompts", path, "holds no prompt"))
    if not path.endswith(".jsonl"):
        return [Prompt({"prompt": line}, f"{path}:{n}") for n, line in lines]
    return [Prompt(_object(line, f"{path}:{n}"), f"{path}:{n}") for n, line in lines]


def _object(line: str, where: str) -> dict[str, Any]:
    """Parse a line of a .jsonl file of prompts; return its object. Raises ConfigError if that is no prompt."""
    with as_refusal("--prompts", where, Malformed, why="no JSON: {}"):
        found = documents.from_json(line.encode())
    kinds = [kind for kind in KINDS if isinstance(found, dict) and kind in found]
    if len(kinds) != 1:
        raise ConfigError(violation("--prompts", where, f"an object with one of {', '.join(KINDS)} is needed"))
    return found


def ends_of(vocabulary: Vocabulary | None, generation: bytes) -> list[int]:
    """Return the token ids that end a model's answer: of documents, chat messages, or in generation_config.json."""
    found = set(_said(generation))
    if vocabulary is not None:
        found.add(vocabulary.special.end)
        found |= {i for token in _TURNS if (i := vocabulary.tokenizer.token_to_id(token)) is not None}
    return sorted(found)


def _said(generation: bytes) -> Iterator[int]:
    """Yield the token ids by which a generation_config.json ends a model's answer; none if it is not readable."""
    try:
        found = documents.from_json(generation or b"{}").get("eos_token_id")
    except (Malformed, AttributeError):
        return
    yield from (i for i in (found if isinstance(found, list) else [found]) if type(i) is int and 0 <= i < _IDS)


def room(rows: Sequence[Sequence[int]], model: Model) -> int:
    """Return how many tokens of a model's length the longest prompt of `rows` leaves for an answer; 1 or more."""
    read = 1 if model.kind == "encoder_decoder" else max(map(len, rows))
    return max(1, model.length - read)


def too_long(prompts: Sequence[Prompt], rows: Sequence[Sequence[int]], model: Model, tokens: int) -> Iterator[str]:
    """Yield a refusal line for each prompt that, with `tokens` of answer, does not fit into the model's length."""
    for prompt, ids in zip(prompts, rows, strict=True):
        if model.kind == "encoder_decoder":
            most = model.source_length or model.length
            if len(ids) > most:
                yield violation(
                    "prompt", prompt.where, f"has {count_of(len(ids), 'token')}, and its encoder reads {most}"
                )
        elif len(ids) + tokens > model.length:
            room = model.length - len(ids)
            why = f"has {count_of(len(ids), 'token')}, and with --tokens={tokens} more than model.length={model.length}"
            yield violation("prompt", prompt.where, why, [f"--tokens={room}"] if room > 0 else [])
    if model.kind == "encoder_decoder" and tokens + 1 > model.length:
        yield violation(
            "--tokens", tokens, f"is more than model.length={model.length} has room for", [model.length - 1]
        )
