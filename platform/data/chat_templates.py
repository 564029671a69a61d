"""Tokenizers of strangers, which run in a child process: a few lines of tokenizer.json make of a letter gigabytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np

from platform.boundary.confinement import (
    Limits,
    Parser,
    borrow_parser_process,
    compute_limits,
    release_parser_process,
    use_parser,
)
from platform.boundary.documents import find_half_character, parse_json
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed, map_nested_values

_PARSER = "platform.data.parsers:answer_tokenizer"
_MEMORY, _SECONDS = 512 << 20, 60  # that a tokenizer takes, at the least
_PER_FILE = 64  # bytes of memory for each of a tokenizer's files
_PER_TEXT = 1500  # and for each of the text that it encodes
_READ, _ENCODED = 2e6, 2e4  # bytes of files and of text in a second of processor time, at the least
_TOKENS = 16  # most tokens of a byte of text; a letter may become 18 others
_VALUES = 1 << 24  # most tokens of a vocabulary


class AddedToken(NamedTuple):
    """Token that was added to a vocabulary: its spelling, and whether it is special."""

    content: str
    special: bool


class EncodedText(NamedTuple):
    """Tokens of a text: ids, and where in the text each begins (always 0) and ends, if that was asked for."""

    ids: list[int]
    offsets: list[tuple[int, int]]


def build_tokenizer_json(files: Mapping[str, bytes], words: str) -> bytes:
    """Make a tokenizer.json of a tokenizer's other `files` (name -> bytes), in a child process. Raises Malformed."""
    request = {"do": "make", "files": [(name, len(raw)) for name, raw in files.items()], "words": words}
    return _ask_parser_once(request, b"".join(files.values()))


def add_tokens_to_json(raw: bytes, tokens: Sequence[str]) -> bytes:
    """Add special tokens to a tokenizer.json, in a child process; return its bytes. Raises Malformed."""
    return _ask_parser_once({"do": "add", "tokens": [*tokens]}, raw)


def _ask_parser_once(request: dict[str, Any], body: bytes) -> bytes:
    """Send one request to a child process that parses tokenizers' files, and return its answer. Raises Malformed."""
    with use_parser(_PARSER) as parser:
        return parser.request_answer(request, body, _parsing_limits(len(body)))


def _parsing_limits(size: int) -> Limits:
    """Return the limits of memory, time and output for parsing a tokenizer's files of `size` bytes in all."""
    return compute_limits(_MEMORY + _PER_FILE * size, _SECONDS + size / _READ, (64 << 20) + 8 * size)


class ConfinedTokenizer:
    """Tokenizer of a tokenizer.json of anybody's, with those methods of the library's that are used here; a child
    process runs it. Raises Malformed if it is none; encoding and decoding raise ConfigError."""

    def __init__(self, raw: bytes):
        """Open the tokenizer.json `raw` in a child process, which alone parses it."""
        self._raw, self._lock = raw, Lock()
        self._start_parser()

    def _start_parser(self) -> None:
        """Start the child process that runs this tokenizer, and take over its tokens and ids. Raises Malformed."""
        self._parser: Parser = borrow_parser_process(_PARSER)
        finalize(self, release_parser_process, self._parser)
        bounds = _parsing_limits(len(self._raw))
        answer = self._parser.request_answer({"do": "open"}, self._raw, bounds)
        reply = parse_json(answer, bounds.output, _VALUES, strict=False)
        try:
            self._ids = {text: int(i) for text, i in reply["vocab"].items()}
            self._added = {int(i): AddedToken(str(text), special is True) for i, text, special in reply["added"]}
        except (LookupError, TypeError, ValueError, AttributeError):
            raise Malformed("its parser fails") from None
        self._texts = {i: text for text, i in self._ids.items()} | {i: t.content for i, t in self._added.items()}
        self._highest = max(self._texts, default=-1)

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """Return token -> id of all tokens of this tokenizer, by their spelling."""
        return dict(self._ids)

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Return id -> token of the tokens that were added to this tokenizer's vocabulary, such as special ones."""
        return dict(self._added)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of the token spelled `token` in this tokenizer; None if it has no such token."""
        return self._ids.get(token)

    def id_to_token(self, number: int) -> str | None:
        """Return the spelling of this tokenizer's token of id `number`; None if it has no such token."""
        return self._texts.get(number)

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[EncodedText]:
        """Tokenize texts in the child process; return the token ids of each, without their places in the text."""
        return self._encode_texts(texts, False)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[EncodedText]:
        """Tokenize texts in the child process; return the token ids of each, and where in the text each token ends."""
        return self._encode_texts(texts, True)

    def _encode_texts(self, texts: Sequence[str], ends: bool) -> list[EncodedText]:
        """Tokenize texts in the child process; return the tokens of each, with their `ends` in the text if wanted.
        Raises ConfigError for illegal text or a failed parser."""
        if not texts:
            return []
        for number, text in enumerate(texts):
            if half := find_half_character(text):
                raise ConfigError(f"data.tokenizer: text {number} of {len(texts)} is none: it has {half}")
        body = json.dumps(list(texts), ensure_ascii=False).encode()
        max_bytes = (_TOKENS * len(body) + (1 << 14)) * 4 * (1 + ends) + 4 * len(texts)
        memory = _MEMORY + _PER_FILE * len(self._raw) + _PER_TEXT * len(body)
        bounds = compute_limits(memory, _SECONDS + len(body) / _ENCODED, max_bytes)
        reply = self._ask_parser({"do": "encode", "ends": ends}, body, bounds)
        numbers = np.frombuffer(reply, np.uint32, len(reply) // 4)
        cuts = [0, *np.cumsum(numbers[: len(texts)], dtype=np.int64).tolist()]
        ids, token_ends = numbers[len(texts) :][: cuts[-1]], numbers[len(texts) + cuts[-1] :]
        is_complete = len(reply) == 4 * (len(texts) + cuts[-1] * (1 + ends)) and len(cuts) == len(texts) + 1
        if not is_complete or (len(ids) and int(ids.max()) > self._highest):
            raise ConfigError("data.tokenizer: its parser fails")
        flat, offsets = ids.tolist(), [(0, end) for end in token_ends.tolist()] if ends else []
        return [EncodedText(flat[a:b], offsets[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text that this tokenizer decodes from token ids. Raises ConfigError if the child process fails."""
        body = json.dumps([int(i) for i in ids]).encode()
        bounds = compute_limits(_MEMORY + _PER_FILE * len(self._raw), _SECONDS, (1 << 20) + 4096 * len(body))
        return self._ask_parser({"do": "decode", "skip": skip_special_tokens}, body, bounds).decode(errors="replace")

    def _ask_parser(self, request: dict[str, Any], body: bytes, bounds: Limits) -> bytes:
        """Send a request to the child process that runs this tokenizer, and return its answer. Raises ConfigError."""
        with self._lock:
            try:
                if not self._parser.is_usable:
                    self._start_parser()
                return self._parser.request_answer(request, body, bounds)
            except Malformed as error:
                raise ConfigError(f"data.tokenizer: the tokenizer fails: {error}") from None


# Chat templates: conversations as the text that a model reads, and which of its tokens are answers.
#
# A template is one of Jinja, as transformers has them (`messages`, `add_generation_prompt`, `bos_token`, `eos_token`,
# `raise_exception`, the filter `tojson` and blocks of {% generation %}). It runs in Jinja's sandbox in a child process
# within limits (`platform.data.parsers`), as its origin is not trusted, and does not know the date, so that one
# conversation is always one text.

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
ANSWERS = "assistant"  # the role whose messages are answers
_CHAT_PARSER = "platform.data.parsers:answer_template"
_CHAT_MEMORY, _CHAT_SECONDS = 256 << 20, 10  # that a template takes, at the least
_OUTPUT = 1 << 22  # bytes that a template may write, beside 4 for each that it reads
_SPEED = 1e7  # bytes that it may write in a second, at the least
_HALF = re.compile("[\ud800-\udfff]")
_HIDDEN = "\ue000"  # stands in a spelling of a special token, so that the template's own are told from a message's

Message = Mapping[str, Any]  # role and content, and whatever else the template reads
Conversation = Sequence[Message]
Parts = Sequence[tuple[str, bool, bool]]  # of a text: each, if it is one special token, if it is of an answer


class ChatTemplate:
    """Chat template, compiled from its text. Raises ConfigError if it is none, naming `key`. `named`: special tokens by
    role; `special`: all that a message must not spell."""

    def __init__(self, text: str, named: Mapping[str, str], special: Sequence[str], key: str = "data.chat_template"):
        """Open a chat template, the `text` of a Jinja template, in a child process. `named`: special tokens by role;
        `special`: all special tokens; `key`: the setting it comes from, for refusals. Raises ConfigError."""
        self._key = key
        self._named = {f"{role}_token": token for role, token in named.items()}
        self._special = sorted((t for t in special if len(t) > 1), key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, self._special)) or "(?!)")
        self._text, self._parser = text, borrow_parser_process(_CHAT_PARSER)
        finalize(self, release_parser_process, self._parser)
        self._ask_parser(b"", compute_limits(_CHAT_MEMORY, _CHAT_SECONDS, 0), "no template of Jinja")

    def _ask_parser(self, body: bytes, bounds: Limits, fault: str) -> bytes:
        """Return the answer of the child process that runs the chat template. Raises ConfigError, with the `fault`."""
        if not self._parser.is_usable:
            self._parser = borrow_parser_process(_CHAT_PARSER)
        try:
            return self._parser.request_answer({"template": self._text}, body, bounds)
        except Malformed as error:
            raise ConfigError(f"{self._key}: {fault}: {error}") from None

    def render_text(self, messages: Conversation, *, prompt: bool = False) -> str:
        """Return the text of a conversation by the chat template; `prompt`: begin an answer too. Raises ConfigError."""
        return self._remove_marks(self._render_texts(messages, [(len(messages), prompt)])[0])

    def render_prompt_parts(self, messages: Conversation) -> Iterator[tuple[str, bool]]:
        """Yield the text of a conversation, by the chat template, with the beginning of an answer: (part, True if it is
        one special token). Raises ConfigError if the template refuses it."""
        [full_text] = self._render_texts(messages, [(len(messages), True)])
        return ((text, special) for text, special, _ in self._split_at_special_tokens(full_text, True))

    def render_parts(self, messages: Conversation) -> Iterator[tuple[str, bool, bool]]:
        """Yield the text of a conversation, by the chat template, in parts: (part, True if it is one special token,
        True if it is of an answer). Raises ConfigError if the template refuses it, or writes no answer behind its
        prompt."""
        position = 0
        answers = [i for i, message in enumerate(messages) if message.get("role") == ANSWERS]
        ends = [end for i in answers for end in ((i, True), (i + 1, False))]
        full_text, *prefixes = self._render_texts(messages, [(len(messages), False), *ends])
        for i, before, after in zip(answers, prefixes[::2], prefixes[1::2], strict=True):
            if not after.startswith(before) or not full_text.startswith(after):
                raise ConfigError(f"{self._key}: what it writes of message {i} does not follow what it writes before")
            yield from self._split_at_special_tokens(full_text[position : len(before)], False)
            yield from self._split_at_special_tokens(full_text[len(before) : len(after)], True)
            position = len(after)
        yield from self._split_at_special_tokens(full_text[position:], False)

    def _render_texts(self, messages: Conversation, wanted: Sequence[tuple[int, bool]]) -> list[str]:
        """Return the texts that the chat template makes of a conversation, one for each of `wanted`: (how many of its
        messages, True to begin an answer after them). Spellings of special tokens in messages are marked."""
        hidden = map_nested_values([*messages], str, self._mark_special_tokens)
        body = json.dumps({"messages": hidden, "named": self._named, "wanted": wanted}, default=str).encode()
        output = _OUTPUT + 4 * len(body) * len(wanted)
        bounds = compute_limits(_CHAT_MEMORY + 8 * output, _CHAT_SECONDS + output / _SPEED, output)
        reply = self._ask_parser(body, bounds, "refuses a conversation")
        try:
            texts = parse_json(reply, output + 1)
        except Malformed:
            texts = None
        if not isinstance(texts, list) or len(texts) != len(wanted) or not all(isinstance(t, str) for t in texts):
            raise ConfigError(f"{self._key}: refuses a conversation: its parser fails")
        if any(not text.isascii() and _HALF.search(text) for text in texts):
            raise ConfigError(f"{self._key}: refuses a conversation: it writes half a surrogate pair")
        return texts

    def _mark_special_tokens(self, text: str) -> str:
        """Mark each spelling of a special token in a message's text, lest the tokenizer take it for the token."""
        return self._spelling.sub(lambda m: m[0][0] + _HIDDEN + m[0][1:], text.replace(_HIDDEN, ""))

    def _split_at_special_tokens(self, text: str, answer: bool) -> Iterator[tuple[str, bool, bool]]:
        """Cut a conversation's text at its special tokens: yield (part, True if it is a special token, `answer`)."""
        position = 0
        for spelling in self._spelling.finditer(text):
            if spelling.start() > position:
                yield self._remove_marks(text[position : spelling.start()]), False, answer
            yield spelling[0], True, answer
            position = spelling.end()
        if position < len(text):
            yield self._remove_marks(text[position:]), False, answer

    @staticmethod
    def _remove_marks(text: str) -> str:
        """Remove from a message's text the marks that `_mark_special_tokens` has set in special tokens' spellings."""
        return text.replace(_HIDDEN, "")


def parse_conversation(value: Any) -> Conversation | None:
    """Return plain data as a conversation, a list of messages with a role each; None if it is anything else."""
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        return value
    return None
