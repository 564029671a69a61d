"""Chat templates: conversations as the text that a model reads, and which of its tokens are answers.

A template is one of Jinja, as transformers has them (`messages`, `add_generation_prompt`, `bos_token`, `eos_token`,
`raise_exception`, the filter `tojson` and blocks of {% generation %}). It runs in Jinja's sandbox in a child process
within limits (`platform.data.parsers`), as its origin is not trusted, and does not know the date, so that one
conversation is always one text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import finalize

from platform.boundary.confined import Limits, borrow, give_back, limits
from platform.boundary.documents import from_json
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed, changed

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
ANSWERS = "assistant"  # the role whose messages are answers
_PARSER = "platform.data.parsers.template_parser:answer_template"
_MEMORY, _SECONDS = 256 << 20, 10  # that a template takes, at the least
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
        self._text, self._parser = text, borrow(_PARSER)
        finalize(self, give_back, self._parser)
        self._ask(b"", limits(_MEMORY, _SECONDS, 0), "no template of Jinja")

    def _ask(self, body: bytes, bounds: Limits, fault: str) -> bytes:
        """Return the answer of the child process that runs the chat template. Raises ConfigError, with the `fault`."""
        if not self._parser.usable:
            self._parser = borrow(_PARSER)
        try:
            return self._parser.ask({"template": self._text}, body, bounds)
        except Malformed as error:
            raise ConfigError(f"{self._key}: {fault}: {error}") from None

    def text(self, messages: Conversation, *, prompt: bool = False) -> str:
        """Return the text of a conversation by the chat template; `prompt`: begin an answer too. Raises ConfigError."""
        return self._shown(self._rendered(messages, [(len(messages), prompt)])[0])

    def prompt_parts(self, messages: Conversation) -> Iterator[tuple[str, bool]]:
        """Yield the text of a conversation, by the chat template, with the beginning of an answer: (part, True if it is
        one special token). Raises ConfigError if the template refuses it."""
        [whole] = self._rendered(messages, [(len(messages), True)])
        return ((text, special) for text, special, _ in self._split(whole, True))

    def parts(self, messages: Conversation) -> Iterator[tuple[str, bool, bool]]:
        """Yield the text of a conversation, by the chat template, in parts: (part, True if it is one special token,
        True if it is of an answer). Raises ConfigError if the template refuses it, or writes no answer behind its
        prompt."""
        place = 0
        answers = [i for i, message in enumerate(messages) if message.get("role") == ANSWERS]
        ends = [end for i in answers for end in ((i, True), (i + 1, False))]
        whole, *found = self._rendered(messages, [(len(messages), False), *ends])
        for i, before, after in zip(answers, found[::2], found[1::2], strict=True):
            if not after.startswith(before) or not whole.startswith(after):
                raise ConfigError(f"{self._key}: what it writes of message {i} does not follow what it writes before")
            yield from self._split(whole[place : len(before)], False)
            yield from self._split(whole[len(before) : len(after)], True)
            place = len(after)
        yield from self._split(whole[place:], False)

    def _rendered(self, messages: Conversation, wanted: Sequence[tuple[int, bool]]) -> list[str]:
        """Return the texts that the chat template makes of a conversation, one for each of `wanted`: (how many of its
        messages, True to begin an answer after them). Spellings of special tokens in messages are marked."""
        hidden = changed([*messages], str, self._hidden)
        body = json.dumps({"messages": hidden, "named": self._named, "wanted": wanted}, default=str).encode()
        output = _OUTPUT + 4 * len(body) * len(wanted)
        bounds = limits(_MEMORY + 8 * output, _SECONDS + output / _SPEED, output)
        reply = self._ask(body, bounds, "refuses a conversation")
        try:
            texts = from_json(reply, output + 1)
        except Malformed:
            texts = None
        if not isinstance(texts, list) or len(texts) != len(wanted) or not all(isinstance(t, str) for t in texts):
            raise ConfigError(f"{self._key}: refuses a conversation: its parser fails")
        if any(not text.isascii() and _HALF.search(text) for text in texts):
            raise ConfigError(f"{self._key}: refuses a conversation: it writes half a surrogate pair")
        return texts

    def _hidden(self, text: str) -> str:
        """Mark each spelling of a special token in a message's text, lest the tokenizer take it for the token."""
        return self._spelling.sub(lambda m: m[0][0] + _HIDDEN + m[0][1:], text.replace(_HIDDEN, ""))

    def _split(self, text: str, answer: bool) -> Iterator[tuple[str, bool, bool]]:
        """Cut a conversation's text at its special tokens: yield (part, True if it is a special token, `answer`)."""
        place = 0
        for found in self._spelling.finditer(text):
            if found.start() > place:
                yield self._shown(text[place : found.start()]), False, answer
            yield found[0], True, answer
            place = found.end()
        if place < len(text):
            yield self._shown(text[place:]), False, answer

    @staticmethod
    def _shown(text: str) -> str:
        """Remove the marks of special tokens' spellings, which `_hidden` has set, from a message's text."""
        return text.replace(_HIDDEN, "")


def conversation(value: Any) -> Conversation | None:
    """Return plain data as a conversation, a list of messages with a role each; None if it is anything else."""
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        return value
    return None
