"""Tokenizers of strangers, which run in a child process: a few lines of tokenizer.json make of a letter gigabytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, repeat
from threading import Lock
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np

from platform.boundary.confinement import (
    Limits,
    ParserProcess,
    borrow_parser_process,
    compute_limits,
    keep_parser_process_idle,
    use_parser,
)
from platform.boundary.documents import find_lone_surrogate, parse_json
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
    offsets: list[Span]


def build_tokenizer_json(files: Mapping[str, bytes], words: str) -> bytes:
    """Make a tokenizer.json of a tokenizer's other `files` (name -> bytes), in a child process. Raises Malformed."""
    request = {"do": "make", "files": [(name, len(raw)) for name, raw in files.items()], "words": words}
    return _request_parser_once(request, b"".join(files.values()))


def add_tokens_to_json(raw: bytes, tokens: Sequence[str]) -> bytes:
    """Add special tokens to a tokenizer.json, in a child process; return its bytes. Raises Malformed."""
    return _request_parser_once({"do": "add", "tokens": [*tokens]}, raw)


def _request_parser_once(request: dict[str, Any], body: bytes) -> bytes:
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
        self._parser: ParserProcess = borrow_parser_process(_PARSER)
        finalize(self, keep_parser_process_idle, self._parser)
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
            if half := find_lone_surrogate(text):
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
Tools = Sequence[Any] | None  # that are named beside a conversation
Span = tuple[int, int]  # of a text: from a place to a place
Rendered = tuple[str, list[Span]]  # a text, and what its template marks as generated
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's thoughts; templates read the first
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OTHERS = ("first reply", "others")  # texts in the place of an answer; neither letter at an end is the other's


class _Variant(NamedTuple):
    """Variant of a conversation that a template writes: its `first` messages, that at `place` being another
    `message`, and the beginning of an answer (`prompt`). An `optional` one may be refused."""

    first: int
    prompt: bool = False
    tools: bool = True
    place: int = 0
    message: Message | None = None
    optional: bool = False


def _list_probe_variants(messages: Conversation, place: int) -> list[_Variant]:
    """Return the variants of a conversation that show where the answer at `place` lies: with two other texts in its
    place and in its calls, with a plain text instead, up to it and the beginning of an answer, and up to its end."""
    message = messages[place]
    bare = {k: v for k, v in message.items() if k not in (*REASONING, "tool_calls")}
    others = [{**message, **_replace_texts(message, text)} for text in _OTHERS]
    replaced = [_Variant(len(messages), place=place, message=other) for other in others]
    plain = _Variant(len(messages), place=place, message=bare | _replace_texts(bare, _OTHERS[0]), optional=True)
    return [*replaced, plain, _Variant(place, True, optional=True), _Variant(place + 1, optional=True)]


def _replace_texts(message: Message, text: str) -> dict[str, Any]:
    """Return the content and the calls of a message with another `text` as its content, in the same form, and as what
    it calls a function with; a blank content beside calls stays."""
    parts: dict[str, Any] = {}
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        named = [json.dumps({"text": text}) if isinstance(f["arguments"], str) else {"text": text} for f in functions]
        changed = [{**f, "arguments": arguments} for f, arguments in zip(functions, named, strict=True)]
        parts["tool_calls"] = [{**call, "function": f} for call, f in zip(calls, changed, strict=True)]
    if not calls or read_message_text(message).strip():
        is_list = isinstance(message.get("content"), list)
        parts["content"] = [{"type": "text", "text": text}] if is_list else text
    return parts


def _count_common_prefix(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _rename_reasoning_fields(message: Message) -> Message:
    """Return a message whose thoughts have the names by which templates read them, as `transformers` passes it."""
    thoughts = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def read_message_text(message: Message) -> str:
    """Return the text of a message's content, which may be in parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def list_spellings(messages: Conversation) -> list[Conversation]:
    """Return a conversation in the forms in which templates may want it, the one that was given first: with arguments
    of calls as text, and with contents in parts or, if they are in parts, as text."""
    is_parted = any(isinstance(message.get("content"), list) for message in messages)
    others: list[list[dict[str, Any]]] = [[], []]
    for message in messages:
        calls = message.get("tool_calls") or []
        dumped = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
        spelt = [{**c, "function": {**c["function"], "arguments": a}} for c, a in zip(calls, dumped, strict=True)]
        text = read_message_text(message)
        others[0].append({**message, "content": text, **({"tool_calls": spelt} if calls else {})})
        others[1].append({**message, "content": text if is_parted else [{"type": "text", "text": text}]})
    return [messages, *others]


def list_called_names(message: Message) -> list[str]:
    """Return the names of the functions that a message calls."""
    return [call["function"]["name"] for call in message.get("tool_calls") or []]


def _is_answer_text(message: Message, written: str) -> bool:
    """Return True if an answer as `written` in a conversation's text is the text of its message, without regard to
    blanks, and to thoughts at its beginning."""
    content, text = ("".join(part.split()) for part in (read_message_text(message), written))
    if message.get("tool_calls"):
        return content.rpartition("</think>")[2] in text
    return bool(text) and content.endswith(text)


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
        finalize(self, keep_parser_process_idle, self._parser)
        self._ask_parser(b"", compute_limits(_CHAT_MEMORY, _CHAT_SECONDS, 0), "no template of Jinja")

    def _ask_parser(self, body: bytes, bounds: Limits, fault: str) -> bytes:
        """Return the answer of the child process that runs the chat template. Raises ConfigError, with the `fault`."""
        if not self._parser.is_usable:
            self._parser = borrow_parser_process(_CHAT_PARSER)
        try:
            return self._parser.request_answer({"template": self._text}, body, bounds)
        except Malformed as error:
            cure = "; nearest legal: data.date=YYYY-MM-DD" if "'strftime_now' is undefined" in str(error) else ""
            raise ConfigError(f"{self._key}: {fault}: {error}{cure}") from None

    def render_text(self, messages: Conversation, tools: Tools = None, *, prompt: bool = False) -> str:
        """Return the text of a conversation by the chat template; `prompt`: begin an answer too. Raises ConfigError."""
        return self._remove_marks(self._render(messages, tools, _Variant(len(messages), prompt))[0])

    def render_prompt_parts(self, messages: Conversation) -> Iterator[tuple[str, bool]]:
        """Yield the text of a conversation, by the chat template, with the beginning of an answer: (part, True if it is
        one special token). Raises ConfigError if the template refuses it."""
        full_text, _ = self._render(messages, None, _Variant(len(messages), True))
        return ((text, special) for text, special, _ in self._split_at_special_tokens(full_text, True))

    def render_parts(self, messages: Conversation, tools: Tools = None, skipped: Sequence[int] = ()) -> Parts:
        """Return the text of a conversation, by the chat template, in parts: (part, True if it is one special token,
        True if it is learned). Blocks of {% generation %} are learned or, without any, the answers, except the messages
        `skipped`. Raises ConfigError if the template refuses the conversation, leaves out `tools`, or
        does not write an answer as it is."""
        text, spans = self._render(messages, tools, _Variant(len(messages)))
        answers = [i for i, message in enumerate(messages) if message.get("role") == ANSWERS]
        if tools and self._render(messages, tools, _Variant(len(messages), tools=False, optional=True))[0] == text:
            raise self._build_field_refusal("does not write tools", "tools")
        if not self.has_marks:
            spans = self._locate_answers(messages, tools, text, answers)
        elif skipped and len(spans) != len(answers):
            counts = f"{len(spans)} stretches for {len(answers)} answers"
            raise self._build_field_refusal(f"marks {counts}, of which some are not to be learned", "weight")
        mask = bytearray(len(text))
        for (start, end), place in zip(spans, answers if skipped else repeat(-1), strict=False):
            if place not in skipped:
                mask[start:end] = b"\1" * (end - start)
        calls = [name for i in answers if i not in skipped for name in list_called_names(messages[i])]
        learned = "".join(compress(text, mask))
        if any(self._mark_special_tokens(name) not in learned for name in calls):
            raise self._build_field_refusal("does not write all tool_calls", "tool_calls")
        runs = re.finditer(rb"\x00+|\x01+", mask)
        return [part for r in runs for part in self._split_at_special_tokens(text[slice(*r.span())], r[0][0] == 1)]

    def _build_field_refusal(self, reason: str, field: str) -> ConfigError:
        """Return the refusal of a conversation whose `field` the chat template does not follow, with the cures."""
        cure = f"nearest legal: another data.chat_template or, to leave it out, data.unread=[{field}]"
        return ConfigError(f"{self._key}: {reason}; {cure}")

    @property
    def has_marks(self) -> bool:
        """Return True if the template has blocks of {% generation %}, the parts to be learned."""
        return bool(_MARK.search(self._text))

    def _locate_answers(self, messages: Conversation, tools: Tools, text: str, answers: Sequence[int]) -> list[Span]:
        """Return where in a conversation's `text` its `answers` lie, by the places of their messages: what changes when
        two other texts replace one, from where its prompt ends to its end-of-turn token. Raises ConfigError."""
        spans: list[Span] = []
        variants = [variant for i in answers for variant in _list_probe_variants(messages, i)]
        rendered = [variant_text for variant_text, _ in self._render_variants(messages, tools, variants)]
        for i, first, second, plain, before, after in zip(answers, *(rendered[k::5] for k in range(5)), strict=True):
            start = _count_common_prefix(first, second)
            tail = min(_count_common_prefix(first[::-1], second[::-1]), _count_common_prefix(text[::-1], first[::-1]))
            longer, rest = divmod(len(first) - len(second), len(_OTHERS[0]) - len(_OTHERS[1]))
            times = 1 + len(messages[i].get("tool_calls") or ())
            is_once = first.startswith(_OTHERS[0], start) and 1 <= longer <= times and not rest
            start = min(start, _count_common_prefix(text, first))
            end = max(start, len(text) - tail)
            if not is_once and times > 1:
                raise self._build_field_refusal("does not write all tool_calls", "tool_calls")
            if not is_once or not _is_answer_text(messages[i], self._remove_marks(text[start:end])):
                reason = f"does not write the text of message {i} as it is, and once"
                raise ConfigError(
                    f"{self._key}: {reason}; nearest legal: chatml, or a template with {{% generation %}}"
                )
            start = min(start, _count_common_prefix(text, plain)) if plain else start
            last = spans[-1][1] if spans else 0
            if before and text.startswith(before) and last <= len(before) <= start:
                start = len(before)
            else:
                start = self._find_turn_start(messages, tools, i, text[:start], last, before)
            if after and text.startswith(after) and len(after) >= end:
                end = len(after)
            else:
                end += self._measure_turn_end(messages, tools, i, text[end:])
            spans.append((start, end))
        return spans

    def _find_turn_start(
        self, messages: Conversation, tools: Tools, place: int, text: str, last: int, before: str
    ) -> int:
        """Return where the answer of message `place` begins, in the `text` before what changes with it: behind the
        words that prompt for it, if they stand behind the answer before, which ends at `last`. `before`: the text of
        the messages before with these words."""
        [(bare, _)] = self._render_variants(messages, tools, [_Variant(place, optional=True)])
        words = before[len(bare) :] if before.startswith(bare) else ""
        found_at = text.rfind(words, last) if words else -1
        return found_at + len(words) if found_at >= 0 else len(text)

    def _measure_turn_end(self, messages: Conversation, tools: Tools, place: int, rest: str) -> int:
        """Return the length of what ends the turn of message `place` at the beginning of `rest`, the text behind it:
        what also stands there if the conversation ends with it, or else a special token. Raises ConfigError."""
        variants = [v._replace(first=place + 1, optional=True) for v in _list_probe_variants(messages, place)[:2]]
        (first, _), (second, _) = self._render_variants(messages, tools, variants)
        tail = _count_common_prefix(first[::-1], second[::-1])
        ending, special = first[len(first) - tail :], self._spelling.match(rest)
        common = rest[: _count_common_prefix(ending, rest)]
        ends = [match.end() for match in re.finditer(rf"\s+|{self._spelling.pattern}", common)]
        if common == ending:
            return len(common)
        if not ends and not special:
            reason = f"ends message {place} otherwise than a conversation, without a special token"
            raise ConfigError(f"{self._key}: {reason}; nearest legal: chatml, data.special_tokens=[TOKEN]")
        return max([*ends, special.end() if special else 0])

    def _render(self, messages: Conversation, tools: Tools, variant: _Variant) -> Rendered:
        """Return the text of one variant of a conversation, with the stretches of it that the template marks."""
        return self._render_variants(messages, tools, [variant])[0]

    def _render_variants(self, messages: Conversation, tools: Tools, variants: Sequence[_Variant]) -> list[Rendered]:
        """Return the texts that the chat template makes of variants of a conversation, "" for an optional one that it
        refuses, each with the stretches that it marks as generated. Spellings of special tokens are marked."""
        named = [v._replace(message=v.message and _rename_reasoning_fields(v.message))._asdict() for v in variants]
        asked = {"messages": [*map(_rename_reasoning_fields, messages)], "tools": tools, "variants": named}
        asked = map_nested_values(asked, str, self._mark_special_tokens)
        body = json.dumps({**asked, "named": self._named}, default=str).encode()
        output = _OUTPUT + 4 * len(body) * len(variants)
        bounds = compute_limits(_CHAT_MEMORY + 8 * output, _CHAT_SECONDS + output / _SPEED, output)
        reply = self._ask_parser(body, bounds, "refuses a conversation")
        try:
            rendered: list[Any] = [part or ("", []) for part in parse_json(reply, output + 1)]
            texts = [(str(text), [(int(a), int(b)) for a, b in spans]) for text, spans in rendered]
        except (Malformed, TypeError, ValueError):
            texts = []
        if len(texts) != len(variants) or any(not 0 <= a <= b <= len(t) for t, spans in texts for a, b in spans):
            raise ConfigError(f"{self._key}: refuses a conversation: its parser fails")
        if any(not text.isascii() and _HALF.search(text) for text, _ in texts):
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
