"""Tokens of instruction data, of which only the answers are to be learned."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice

import numpy as np

from platform.config.fields import ConfigError, Data
from platform.data.kinds.of_documents import Documents, Encoded, Form, splits_of, write_documents
from platform.data.kinds.of_texts import deciding
from platform.data.kinds.source_kind import SourceKind, checked, held_files
from platform.data.sources.conversations import ENDINGS, Instruction, instruction_files, more_fields, read_instructions
from platform.data.tokenizers.chat import ANSWERS, Parts
from platform.data.vocabulary import Vocabulary

_BATCH = 1024  # conversations that are encoded at once


def encode_instructions(vocabulary: Vocabulary | None, documents: Documents, characters: int) -> Iterator[Encoded]:
    """Encode conversations as the chat template of the vocabulary writes them; pairs of a vocabulary without one as
    what begins documents, the prompt, the answer, and what ends documents. Raises ConfigError, with the place, for a
    conversation that the template refuses."""
    assert vocabulary
    while batch := [instruction for _, instruction in islice(documents, _BATCH)]:
        found = vocabulary.encode_parts([_parts(instruction, vocabulary) for instruction in batch])
        ids = np.array([i for some, _ in found for i in some], np.int64)
        learned = np.array([wanted for _, some in found for wanted in some], bool)
        ends = np.cumsum([len(some) for some, _ in found])
        yield Encoded(ids, [0, *ends[:-1].tolist()], learned)


def _parts(instruction: Instruction, vocabulary: Vocabulary) -> Parts:
    """Return a conversation as parts of text, each with whether it is one special token, and whether it is to be
    learned. Raises ConfigError."""
    if instruction.pair and not vocabulary.has_chat:
        prompt, answer = instruction.texts
        begin, end = (vocabulary.spelling(i) for i in (vocabulary.special.begin, vocabulary.special.end))
        return [(begin, True, False), (prompt, False, False), (answer, False, True), (end, True, True)]
    try:
        parts = list(vocabulary.chat.parts(instruction.messages))
    except ConfigError as error:
        raise ConfigError(f"{instruction.place}: {error}") from None
    if not _writes_answer(instruction, "".join(text for text, special, answer in parts if answer and not special)):
        reason = "the chat template writes no answer of this conversation, of which nothing would be learned"
        raise ConfigError(f"{instruction.place}: {reason}; nearest legal: another data.chat_template")
    return parts


def _writes_answer(instruction: Instruction, learned: str) -> bool:
    """Return True if what is learned of a conversation has a word of its answers; for answers that are no text, any."""
    contents = [message.get("content") for message in instruction.messages if message["role"] == ANSWERS]
    words = [word for content in contents if isinstance(content, str) for word in content.split()]
    return any(word in learned for word in words) if words else bool(learned.strip())


def _check(data: Data) -> list[str]:
    """Return one refusal line per mistake in files of instructions that shows in their beginnings."""
    lines = checked(instruction_files, data) or checked(lambda data: held_files(data, ENDINGS), data)
    for file in [] if lines else [*instruction_files(data), *held_files(data, ENDINGS)]:
        lines += checked(lambda data, file=file: next(read_instructions([file], data), None), data)  # type: ignore[misc]
    return lines


FORM = Form(
    read_instructions,
    encode_instructions,
    texts=lambda instruction: instruction.texts,
    size=lambda instruction: sum(map(len, instruction.texts)),
    endings=ENDINGS,
    starts=True,
    learned=True,
)
INSTRUCTIONS = SourceKind(
    find=instruction_files,
    check=_check,
    decisive=lambda data, files: ["instructions", *deciding(data, files), *more_fields(data)],
    write=partial(write_documents, FORM),
    texts=lambda files, data: splits_of(FORM, files, data).texts(),
    form=FORM,
)
