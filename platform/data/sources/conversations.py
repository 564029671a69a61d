"""Instruction data: records that hold a conversation, or a prompt and its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from platform.config.fields import ConfigError, Data
from platform.data.sources.data_files import DataFile, encodable, ending, find_files, naming_file
from platform.data.sources.record_files import ROWS
from platform.data.tokenizers.chat import ANSWERS, Conversation, conversation

ENDINGS = [*ROWS]


@dataclass(frozen=True)
class Instruction:
    """Conversation of a record, whose answers are to be learned. `pair`: it was given as a prompt and its answer, which
    need no chat template; `place`: of the record, for a refusal."""

    messages: Conversation
    pair: bool
    place: str

    @property
    def texts(self) -> list[str]:
        """Return the texts of its messages."""
        return [message["content"] for message in self.messages if isinstance(message.get("content"), str)]


def instruction_files(data: Data) -> list[DataFile]:
    """Find the files of data=instructions, which hold records. Raises ConfigError."""
    if not data.path:
        raise ConfigError(f"data.path: data={data.kind} needs a file of records: {', '.join(ENDINGS)}")
    found = find_files("data.path", data.path, ENDINGS)
    if wrong := [file for file in found if ending(file) not in ROWS]:
        raise ConfigError(f"data.path={wrong[0]}: no file of records, which end with {', '.join(ENDINGS)}")
    return found


def read_instructions(
    files: Sequence[DataFile], data: Data, key: str = "data.path"
) -> Iterator[tuple[int, Instruction]]:
    """Yield (number, conversation) of each record of files: its field `data.field` holds messages, or a prompt that
    field `data.target_field` answers; a pair of which one is blank is left out. Raises ConfigError, naming the file, by
    the `key` that leads to it, and the place, for a record that holds neither, and for a conversation without an
    answer."""
    number = 0
    for file in files:
        with naming_file(file, key):
            for place, values in ROWS[ending(file)](file, [data.field, data.target_field]):
                if found := _instruction(values, data, f"{key}={file}: {place}", place):
                    yield number, found
                    number += 1


def _instruction(values: dict[str, Any], data: Data, where: str, place: str) -> Instruction | None:
    """Return the conversation in a record's values; None for a pair of which one is blank. Raises ConfigError."""
    given, answer = values.get(data.field), values.get(data.target_field)
    if isinstance(given, str) and isinstance(answer, str):
        if not given.strip() or not answer.strip():
            return None
        pair = [("user", encodable(given)), (ANSWERS, encodable(answer))]
        return Instruction([{"role": role, "content": text} for role, text in pair], True, where)
    messages = conversation(_encodable(given))
    if not messages:
        there = ", ".join(values) or "none"
        wanted = f"no messages in data.field={data.field}, nor a prompt with its answer in data.target_field"
        raise ConfigError(f"{place} has {wanted}={data.target_field}; its fields: {there}")
    if not any(message["role"] == ANSWERS and _says(message.get("content")) for message in messages):
        raise ConfigError(f"{place} has no answer: no message with role {ANSWERS}")
    return Instruction(messages, False, where)


def _says(content: Any) -> bool:
    """Return True if the content of a message is not blank."""
    return bool(content.strip() if isinstance(content, str) else content)


def _encodable(value: Any) -> Any:
    """Return plain data with lone surrogates in its texts replaced, as `encodable` does."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {key: _encodable(part) for key, part in value.items()}
    return [_encodable(part) for part in value] if isinstance(value, list) else value
