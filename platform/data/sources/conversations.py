"""Source of instructions: conversations, or prompts with answers, of which only the answers are learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from platform.boundary.refusals import ConfigError, rephrasing
from platform.boundary.schema import changed
from platform.config.fields import Data
from platform.data.reading.data_files import DataFile, encodable, ending, naming_file
from platform.data.reading.listing import find_files
from platform.data.reading.record_files import ROWS
from platform.data.sources.source_kind import KINDS, UNREAD, Encoded, SourceKind, more_fields
from platform.data.sources.stream_blocks import Documents
from platform.data.sources.texts import deciding
from platform.data.tokenizers.chat import ANSWERS, Conversation, Parts, conversation
from platform.data.vocabulary import Vocabulary

ENDINGS = [*ROWS]
ALPACA_INPUT = "input"
_SHAREGPT = {
    "human": "user",
    "gpt": ANSWERS,
    "chatgpt": ANSWERS,
    "bing": ANSWERS,
    "bard": ANSWERS,
}  # the name of a role


@dataclass(frozen=True)
class Instruction:
    """Conversation of a record, whose answers are to be learned. `pair`: it was given as a prompt and its answer, which
    need no chat template; `place`: place of the record, for a refusal."""

    messages: Conversation
    pair: bool
    place: str

    @property
    def texts(self) -> list[str]:
        """Return the texts of this conversation's messages, for a tokenizer to be trained on."""
        return [message["content"] for message in self.messages if isinstance(message.get("content"), str)]


def instruction_files(data: Data) -> list[DataFile]:
    """Find the record files of data=instructions (conversations, or prompts with answers). Raises ConfigError."""
    if not data.path:
        raise ConfigError(f"data.path: data={data.kind} needs a file of records: {', '.join(ENDINGS)}")
    found = find_files("data.path", data.path, ENDINGS)
    if wrong := [file for file in found if ending(file) not in ROWS]:
        raise ConfigError(f"data.path={wrong[0]}: no file of records, which end with {', '.join(ENDINGS)}")
    return found


def read_instructions(
    files: Sequence[DataFile], data: Data, key: str = "data.path"
) -> Iterator[tuple[int, Instruction]]:
    """Yield (number, conversation) of each record in data files: its field `data.field` holds messages, of role and
    content or, as ShareGPT has them, from and value; or it holds a prompt, extended by the field `data.input_field` and
    answered by `data.target_field`. A pair with a blank part is left out. Raises ConfigError, naming the file, by the
    `key` that leads to it, and the place, for a record that holds neither, for a conversation without an answer, and
    for a prompt of which a part would not be read."""
    number = 0
    for file in files:
        with naming_file(file, key):
            for place, values in ROWS[ending(file)](file, [data.field, data.target_field, _input_field(data)]):
                if found := _instruction(values, data, f"{key}={file}: {place}", place):
                    yield number, found
                    number += 1


def _instruction(values: dict[str, Any], data: Data, where: str, place: str) -> Instruction | None:
    """Return the conversation that a data record's values hold, None for a pair with a blank part. `where`: the
    record's file and place; `place`: its place alone, for refusals. Raises ConfigError."""
    given, answer = values.get(data.field), values.get(data.target_field)
    if isinstance(given, str) and isinstance(answer, str):
        if not given.strip() or not answer.strip():
            return None
        pair = [("user", encodable(given + _more(values, data, place))), (ANSWERS, encodable(answer))]
        return Instruction([{"role": role, "content": text} for role, text in pair], True, where)
    messages = conversation(_with_roles(changed(given, str, encodable)))
    if not messages:
        there = ", ".join(values) or "none"
        wanted = f"no messages in data.field={data.field}, nor a prompt with its answer in data.target_field"
        wanted += f"={data.target_field}; a message has role and content, or from and value"
        raise ConfigError(f"{place} has {wanted}; its fields: {there}")
    if not any(message["role"] == ANSWERS and _says(message.get("content")) for message in messages):
        raise ConfigError(f"{place} has no answer: no message with role {ANSWERS}")
    return Instruction(messages, False, where)


def _input_field(data: Data) -> str:
    """Return the name of the data record's field that is appended to its prompt: data.input_field, else "input"."""
    return data.input_field or ALPACA_INPUT


def _more(values: dict[str, Any], data: Data, place: str) -> str:
    """Return the text that a data record adds to its prompt, "" for none. Raises ConfigError if it is no text, or if it
    is there and data.input_field does not say whether to add it. `place`: the record's, for the refusal."""
    name = _input_field(data)
    text = values.get(name)
    if data.input_field == UNREAD or name in (data.field, data.target_field) or text is None or text == "":
        return ""
    if not data.input_field:
        reason = f"has text in field {name} too, which goes on the prompt in Alpaca's records"
        legal = f"data.input_field={name} or, to leave it out, data.input_field={UNREAD}"
        if not isinstance(text, str) or not text.strip():
            return ""
        raise ConfigError(f"{place} {reason}, and nothing says so; nearest legal: {legal}")
    if not isinstance(text, str):
        raise ConfigError(f"{place} has no text in data.input_field={name}")
    return f"\n{text}" if text.strip() else ""


def _with_roles(value: Any) -> Any:
    """Convert a conversation from ShareGPT's form (`from`, `value`) to roles and contents; return others as given."""
    said = isinstance(value, list) and all(isinstance(m, dict) and {"from", "value"} <= m.keys() for m in value)
    if not said or not all(isinstance(m["from"], str) for m in value):
        return value
    rest = [{k: v for k, v in m.items() if k not in ("from", "value")} for m in value]
    named = [{"role": _SHAREGPT.get(m["from"], m["from"]), "content": m["value"]} for m in value]
    return [{**more, **message} for more, message in zip(rest, named, strict=True)]


def _says(content: Any) -> bool:
    """Return True if the content of a conversation's message, a text or a list, is not blank."""
    return bool(content.strip() if isinstance(content, str) else content)


_BATCH = 1024  # conversations that are encoded at once


def encode_instructions(vocabulary: Vocabulary | None, documents: Documents, characters: int) -> Iterator[Encoded]:
    """Yield the token ids of conversations, as the tokenizer's chat template writes them, with a mask of the answers'
    tokens, which are learned; prompts with answers need no template. Raises ConfigError, with the place, for a
    conversation that the template refuses."""
    assert vocabulary
    while batch := [instruction for _, instruction in islice(documents, _BATCH)]:
        found = vocabulary.encode_parts([_parts(instruction, vocabulary) for instruction in batch])
        ids = np.array([i for some, _ in found for i in some], np.int64)
        learned = np.array([wanted for _, some in found for wanted in some], bool)
        ends = np.cumsum([len(some) for some, _ in found])
        yield Encoded(ids, [0, *ends[:-1].tolist()], learned)


def _parts(instruction: Instruction, vocabulary: Vocabulary) -> Parts:
    """Write a conversation as pieces of text to be tokenised: (text, True if it is one special token, True if it is
    learned). `vocabulary`: the tokenizer, whose chat template is used. Raises ConfigError if it writes no answer."""
    if instruction.pair and not vocabulary.has_chat:
        prompt, answer = instruction.texts
        begin, end = (vocabulary.spelling(i) for i in (vocabulary.special.begin, vocabulary.special.end))
        return [(begin, True, False), (prompt, False, False), (answer, False, True), (end, True, True)]
    with rephrasing(lambda line: f"{instruction.place}: {line}"):
        parts = list(vocabulary.chat.parts(instruction.messages))
    if not _writes_answer(instruction, "".join(text for text, special, answer in parts if answer and not special)):
        reason = "the chat template writes no answer of this conversation, of which nothing would be learned"
        raise ConfigError(f"{instruction.place}: {reason}; nearest legal: another data.chat_template")
    return parts


def _writes_answer(instruction: Instruction, learned: str) -> bool:
    """Return True if the text that the chat template marks as learned has a word of the conversation's answers."""
    contents = [message.get("content") for message in instruction.messages if message["role"] == ANSWERS]
    words = [word for content in contents if isinstance(content, str) for word in content.split()]
    return any(word in learned for word in words) if words else bool(learned.strip())


KINDS["instructions"] = SourceKind(
    instruction_files,
    read_instructions,
    encode_instructions,
    content=lambda data, files: ["instructions", *deciding(data, files), *more_fields(data)],
    texts=lambda instruction: instruction.texts,
    size=lambda instruction: sum(map(len, instruction.texts)),
    endings=ENDINGS,
    starts=True,
    learned=True,
)
