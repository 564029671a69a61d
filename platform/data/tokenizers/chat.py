"""Chat templates: conversations as the text that a model reads, and which of its tokens are answers.

A template is one of Jinja, as transformers has them (`messages`, `add_generation_prompt`, `bos_token`, `eos_token`,
`raise_exception`, the filter `tojson` and blocks of {% generation %}). It runs in Jinja's sandbox, as it may have come
from anybody, and is not told the date, so that one conversation is always one text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from platform.boundary.documents import one_line
from platform.config.fields import ConfigError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
ANSWERS = "assistant"  # the role whose messages are answers
_HIDDEN = "\ue000"  # stands in a spelling of a special token, so that the template's own are told from a message's

Message = Mapping[str, Any]  # role and content, and whatever else the template reads
Conversation = Sequence[Message]
Parts = Sequence[tuple[str, bool, bool]]  # of a text: each, if it is one special token, if it is of an answer


class ChatTemplate:
    """Chat template, compiled from its text. Raises ConfigError if it is none, naming `key`. `named`: special tokens by
    role; `special`: all that a message must not spell."""

    def __init__(self, text: str, named: Mapping[str, str], special: Sequence[str], key: str = "data.chat_template"):
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._key = key
        self._named = {f"{role}_token": token for role, token in named.items()}
        self._special = sorted((t for t in special if len(t) > 1), key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, self._special)) or "(?!)")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = self._refuse
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ConfigError(f"{key}: no template of Jinja: {_line(error)}") from None

    def _refuse(self, message: str) -> None:
        from jinja2 import TemplateError

        raise TemplateError(message)

    def text(self, messages: Conversation, *, prompt: bool = False) -> str:
        """Return the text of a conversation; with `prompt`, and the beginning of an answer. Raises ConfigError if the
        template refuses it."""
        return self._shown(self._rendered(messages, prompt))

    def prompt_parts(self, messages: Conversation) -> Iterator[tuple[str, bool]]:
        """Yield the text of a conversation with the beginning of an answer in parts, each with whether it is one
        special token. Raises ConfigError if the template refuses it."""
        return ((text, special) for text, special, _ in self._split(self._rendered(messages, True), True))

    def parts(self, messages: Conversation) -> Iterator[tuple[str, bool, bool]]:
        """Yield the text of a conversation in parts, each with whether it is one special token, and whether it is of
        an answer. Raises ConfigError if the template refuses it, or does not write an answer behind its prompt."""
        place = 0
        whole = self._rendered(messages, False)
        for i, message in enumerate(messages):
            if message.get("role") != ANSWERS:
                continue
            before, after = self._rendered(messages[:i], True), self._rendered(messages[: i + 1], False)
            if not after.startswith(before) or not whole.startswith(after):
                raise ConfigError(f"{self._key}: what it writes of message {i} does not follow what it writes before")
            yield from self._split(whole[place : len(before)], False)
            yield from self._split(whole[len(before) : len(after)], True)
            place = len(after)
        yield from self._split(whole[place:], False)

    def _rendered(self, messages: Conversation, prompt: bool) -> str:
        """Return a conversation as the template writes it; what messages spell like a special token is hidden."""
        from jinja2 import TemplateError

        hidden = [self._hidden(message) for message in messages]
        try:
            return self._template.render(messages=hidden, add_generation_prompt=prompt, **self._named)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ConfigError(f"{self._key}: refuses a conversation: {_line(error)}") from None

    def _hidden(self, value: Any) -> Any:
        """Return plain data in which every text that spells a special token has a mark behind its first character."""
        if isinstance(value, str):
            return self._spelling.sub(lambda m: m[0][0] + _HIDDEN + m[0][1:], value.replace(_HIDDEN, ""))
        if isinstance(value, Mapping):
            return {key: self._hidden(part) for key, part in value.items()}
        return [self._hidden(part) for part in value] if isinstance(value, list) else value

    def _split(self, text: str, answer: bool) -> Iterator[tuple[str, bool, bool]]:
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
        return text.replace(_HIDDEN, "")


def _line(error: Exception) -> str:
    return one_line(str(error).encode(errors="replace"))


def _to_json(value: Any, indent: int | None = None, **more: Any) -> str:
    """Return plain data as JSON, without the escapes for HTML of Jinja's own filter."""
    kept = {name: more[name] for name in ("ensure_ascii", "separators", "sort_keys") if name in more}
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **kept})


def _generation() -> type:
    """Return the extension of Jinja that reads blocks of {% generation %}, whose text stays as it is."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """Reads {% generation %} and {% endgeneration %}, which mark answers."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return Generation


def conversation(value: Any) -> Conversation | None:
    """Return plain data as a conversation: a list of messages with a role; None if it is none."""
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        return value
    return None
