"""Conversations of records: recognised by the fields of a record, and brought to one form, as a chat template reads it.

ShareGPT's, OpenAI's and Alpaca's records, and prompts with completions, are known. Other fields that decide about the
text or the mask (`tools`, `system`, `weight`, ...) are read, or refused with the setting for leaving them out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from platform.boundary.documents import parse_json
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed, iterate_texts, map_nested_values, shorten_value
from platform.config.fields import Data
from platform.data.chat_templates import ANSWERS, REASONING, Conversation, Tools, parse_conversation, read_message_text
from platform.data.data_files import (
    ROWS,
    DataFile,
    find_data_files,
    name_file_in_errors,
    replace_surrogates,
    uncompressed_suffix,
)
from platform.data.source_kind import SNIFFED, UNREAD

logger = logging.getLogger(__name__)

ALPACA_INPUT = "input"
CHOSEN, REJECTED, PROMPT = "chosen", "rejected", "prompt"  # fields of a record of preferences
_FORMS = {  # whose records have these fields: data.field, data.target_field, data.input_field
    "ShareGPT": ("conversations", "", ""),
    "OpenAI": ("messages", "", ""),
    "Alpaca": ("instruction", "output", ALPACA_INPUT),
    "prompts and completions": ("prompt", "completion", ""),
}
_KEYS = ("field", "target_field", "input_field")
_UNNAMED = ("messages", "text")  # data.field as the group has it: records are recognised by their fields
_BESIDE = ("tools", "system")  # fields beside a conversation that are read
UNKNOWN = ("functions", "history", CHOSEN, REJECTED)  # and fields that are refused
_FIELDS = [*dict.fromkeys([*(name for form in _FORMS.values() for name in form if name), *_BESIDE, *UNKNOWN])]
_CALL, _ANSWERED = "function_call", "tool"
_SHAREGPT = {
    **{name: ANSWERS for name in ("gpt", "chatgpt", "bing", "bard", ANSWERS, _CALL)},
    **{"human": "user", "user": "user", "system": "system", "observation": _ANSWERED, _ANSWERED: _ANSWERED},
}  # the name of a role
_WEIGHTS = ("weight", "train")  # of a message: whether it is learned


@dataclass(frozen=True)
class Preference:
    """Pair of answers to one prompt, as two conversations: the chosen one and the rejected one."""

    chosen: Instruction
    rejected: Instruction


@dataclass(frozen=True)
class Instruction:
    """Conversation of a record, whose answers are to be learned. `pair`: it was given as a prompt and its answer, which
    need no chat template; `place`: place of the record, for a refusal; `tools`: functions that it describes; `skipped`:
    places of the answers that are not learned."""

    messages: Conversation
    pair: bool
    place: str
    tools: Tools = None
    skipped: tuple[int, ...] = ()

    @property
    def message_texts(self) -> list[str]:
        """Return the texts of this conversation's messages and tools, for a tokenizer to be trained on."""
        read = ("tool_calls", *REASONING)
        more = [*(message[name] for message in self.messages for name in read if name in message), self.tools or []]
        return [*filter(None, map(read_message_text, self.messages)), *iterate_texts(more)]


def read_instructions(
    files: Sequence[DataFile], data: Data, key: str = "data.path"
) -> Iterator[tuple[int, Instruction]]:
    """Yield (number, conversation) of each record in data files: its field `data.field` holds messages, of role and
    content or, as ShareGPT has them, from and value; or it holds a prompt, extended by the field `data.input_field` and
    answered by `data.target_field`. A pair with a blank part is left out. Raises ConfigError, naming the file, by the
    `key` that leads to it, and the place, for a record that holds neither, for a conversation without an answer, and
    for what would not be read."""
    number = 0
    fields = [data.field, data.target_field, data.input_field or ALPACA_INPUT, *_FIELDS]
    for file in files:
        with name_file_in_errors(file, key):
            for place, values in ROWS[uncompressed_suffix(file)](file, fields):
                kept = {k: v for k, v in values.items() if k not in data.unread and v is not None}
                named = _adapt_keys_to_record(kept, data, f"{key}={getattr(data, key.partition('.')[2])}")
                if instruction := _parse_instruction(kept, named, f"{key}={file}: {place}", place):
                    yield number, instruction
                    number += 1


def read_preferences(files: Sequence[DataFile], data: Data, key: str = "data.path") -> Iterator[tuple[int, Preference]]:
    """Yield (number, pair of answers) of each record in data files: its fields `chosen` and `rejected` answer its
    `prompt`, texts or lists of messages, or, without one, begin with it: with the same messages, or the same text.
    Raises ConfigError as `read_instructions` does, and for answers that are equal."""
    data = replace(data, field=PROMPT, target_field="completion", input_field=UNREAD)
    fields = [PROMPT, CHOSEN, REJECTED, *_BESIDE, *UNKNOWN]
    number = 0
    for file in files:
        with name_file_in_errors(file, key):
            for place, values in ROWS[uncompressed_suffix(file)](file, fields):
                kept = {k: v for k, v in values.items() if k not in data.unread and v is not None}
                if pair := _parse_preference(kept, data, f"{key}={file}: {place}", place):
                    yield number, pair
                    number += 1


def recognise_kind(location: str, key: str) -> str:
    """Return the kind of data (data.kind) at a path or URL, by the first record of its files (of many, the first
    SNIFFED): preferences, instructions or text. Raises ConfigError, naming the `key` that leads to it, for records of
    no known form and for files of several kinds."""
    file_by_kind = {_recognise_file_kind(file, key): file for file in find_data_files(key, location)[:SNIFFED]}
    if len(file_by_kind) > 1:
        named = " and ".join(f"{file} of {kind}" for kind, file in sorted(file_by_kind.items()))
        raise ConfigError(f"{key}={location}: holds {named}; nearest legal: files of one kind, or data=KIND")
    return next(iter(file_by_kind))


def _recognise_file_kind(file: DataFile, key: str) -> str:
    """Return the kind of data in a file, by its first record; text if it is no file of records. Raises ConfigError."""
    if uncompressed_suffix(file) not in ROWS:
        return "text"
    with name_file_in_errors(file, key):
        place, values = next(ROWS[uncompressed_suffix(file)](file, [*_FIELDS, "text"]), ("", {}))
        kept = {name: value for name, value in values.items() if value is not None}
        if kept.keys() >= {CHOSEN, REJECTED}:
            return "preferences"
        if _find_record_form(kept):
            return "instructions"
        if "text" in kept:
            return "text"
        fields = ", ".join(values) or "none"
        reason = f"{place} is of no known form; its fields: {fields}" if place else "holds no record"
        raise ConfigError(f"{reason}; nearest legal: data=KIND data.field=NAME")


def _parse_preference(values: Mapping[str, Any], data: Data, where: str, place: str) -> Preference | None:
    """Return the pair of answers that a data record's values hold, None if one is blank; arguments as of
    `_parse_instruction`. Raises ConfigError."""
    answers: list[Any] = [values.get(name) for name in (CHOSEN, REJECTED)]
    chosen, rejected = answers
    kinds = {type(answer) for answer in answers}
    if kinds not in ({str}, {list}):
        reason = "needs fields chosen and rejected, both texts or both lists of messages"
        raise ConfigError(f"{place} {reason}; its fields: {', '.join(values) or 'none'}")
    if chosen == rejected:
        raise ConfigError(f"{place}: chosen and rejected are equal, and a pair needs two answers")
    rest = {name: value for name, value in values.items() if name not in (CHOSEN, REJECTED)}
    prompt = rest.get(PROMPT)
    if prompt is None:
        same = _count_common_beginning(chosen, rejected)
        prompt, answers = chosen[:same], [answer[same:] for answer in answers]
        if not prompt:
            raise ConfigError(f"{place} has no field prompt, nor do chosen and rejected begin with the same one")
    elif kinds == {list} and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    both = [
        _parse_instruction({**rest, PROMPT: prompt, "completion": answer}, data, where, place) for answer in answers
    ]
    return Preference(*both) if both[0] and both[1] else None  # type: ignore[arg-type]


def _count_common_beginning(chosen: Any, rejected: Any) -> int:
    """Return how many messages or characters of two answers are their prompt: all that they begin with in common."""
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    same = min(len(chosen), len(rejected)) if same is None else same
    return same - 1 if same and isinstance(chosen, str) and chosen[same - 1] == " " else same


def _adapt_keys_to_record(values: Mapping[str, Any], data: Data, source: str) -> Data:
    """Return the keys of `data` with the names of a record's fields: as they are or, said once for each `source`, those
    of the form by its fields."""
    form = _find_record_form(values)
    if data.field in values or data.field not in _UNNAMED or not form:
        return data
    names: dict[str, Any] = dict(zip(_KEYS, _FORMS[form], strict=True))
    if data.input_field:
        names["input_field"] = data.input_field
    _say_form(source, form, " ".join(f"data.{key}={name}" for key, name in names.items() if name))
    return replace(data, **names)


def _find_record_form(values: Mapping[str, Any]) -> str:
    """Return the name of the form of records that has the fields of this one; "" if none is known."""
    return next((form for form, names in _FORMS.items() if all(n in values for n in names[:2] if n)), "")


@cache
def _say_form(source: str, form: str, settings: str) -> None:
    """Say once of a source which form its records are recognised as, and the settings that say the same."""
    logger.info("%s: records as %s has them: %s", source, form, settings)


def _parse_instruction(values: Mapping[str, Any], data: Data, where: str, place: str) -> Instruction | None:
    """Return the conversation that a data record's values hold, None for a pair with a blank part. `where`: the
    record's file and place; `place`: its place alone, for refusals. Raises ConfigError."""
    for name in (name for name in UNKNOWN if values.get(name) and name not in (data.field, data.target_field)):
        raise ConfigError(f"{place} has a field {name}, which is not read; {_name_cures(name)}")
    field_value, answer = values.get(data.field), values.get(data.target_field)
    is_pair = isinstance(field_value, str) and isinstance(answer, str)
    prompted = 0
    if isinstance(field_value, str) and isinstance(answer, str):
        if not field_value.strip() or not answer.strip():
            return None
        prompt = field_value + _read_prompt_addition(values, data, place)
        pair = [("user", replace_surrogates(prompt)), (ANSWERS, replace_surrogates(answer))]
        messages: Conversation | None = [{"role": role, "content": text} for role, text in pair]
    else:
        if isinstance(field_value, list) and isinstance(answer, list):  # a prompt of messages, and its answer's
            prompted, field_value = len(field_value), [*field_value, *answer]
        plain = map_nested_values(field_value, str, replace_surrogates)
        messages = parse_conversation(_convert_sharegpt_roles(plain, place))
    if not messages:
        field_names = ", ".join(values) or "none"
        fault = f"no messages in data.field={data.field}, nor a prompt with its answer in data.target_field"
        fault += f"={data.target_field}; a message has role and content, or from and value"
        form = dict(zip(_KEYS, _FORMS.get(_find_record_form(values), ()), strict=False))
        known = " ".join(f"data.{key}={name}" for key, name in form.items() if name)
        nearest = f"; nearest legal: {known}" if known and data.field not in values else ""  # of the record's form
        raise ConfigError(f"{place} has {fault}; its fields: {field_names}{nearest}")
    tools = _read_tools(values, place)
    if system := "" if data.field == "system" else values.get("system"):
        if not isinstance(system, str) or messages[0]["role"] == "system":
            raise ConfigError(f"{place} has a field system beside messages with one; {_name_cures('system')}")
        messages = [{"role": "system", "content": replace_surrogates(system)}, *messages]
        prompted += bool(prompted)
    messages = [_read_message(message, i, data, place) for i, message in enumerate(messages)]
    skipped = [i for i, message in enumerate(messages) if i < prompted or _is_skipped(message, i, place)]
    answers = [i for i, message in enumerate(messages) if message["role"] == ANSWERS and i not in skipped]
    blank = [i for i in answers if not (read_message_text(messages[i]).strip() or messages[i].get("tool_calls"))]
    if len(blank) == len(answers):
        raise ConfigError(f"{place} has no answer: no message with role {ANSWERS} and text, or calls, to be learned")
    if blank:
        raise ConfigError(f"{place} has an answer without text, message {blank[0]}; nearest legal: its weight=0")
    messages = [{k: v for k, v in message.items() if k not in _WEIGHTS} for message in messages]
    return Instruction(messages, is_pair and not (system or tools), where, tools, tuple(skipped))


def _name_cures(field: str) -> str:
    """Return the end of a refusal of a `field` of records: the setting that leaves it out."""
    return f"nearest legal: to leave it out, data.unread=[{field}]"


def _read_tools(values: Mapping[str, Any], place: str) -> Tools:
    """Return the tools that a record names beside its conversation, each as OpenAI describes one; None without any.
    Raises ConfigError."""
    tools = values.get("tools")
    tools = _parse_json_or_text(tools) if isinstance(tools, str) else tools
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{place} has a field tools that is no list of tools; {_name_cures('tools')}")
    tools = map_nested_values(tools, str, replace_surrogates)
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _parse_json_or_text(text: str) -> Any:
    """Return the plain data that a text of JSON says; the text itself if it says none."""
    try:
        return parse_json(text.encode(), len(text) * 4, strict=False)
    except Malformed:
        return text


def _read_message(message: Mapping[str, Any], number: int, data: Data, place: str) -> dict[str, Any]:
    """Return message `number` of a conversation without empty and unread fields, with its calls as templates read them.
    Raises ConfigError for content other than text."""
    kept = {k: v for k, v in message.items() if k not in data.unread and (v is not None or k == "content")}
    content = kept.setdefault("content", "")
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            reason = f"message {number} has a part of type {shorten_value(kind)}, and only text is read"
            raise ConfigError(f"{place}: {reason}; nearest legal: parts of type text")
    if not isinstance(content, str | list | None):
        raise ConfigError(f"{place}: message {number} has content that is no text; nearest legal: content of text")
    if _CALL in kept:
        kept["tool_calls"] = [{"type": "function", "function": kept.pop(_CALL)}]
    calls = kept.get("tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]
    functions = [call.get("function", call) if isinstance(call, dict) else None for call in calls]
    if not all(isinstance(f, dict) and isinstance(f.get("name"), str) for f in functions):
        raise ConfigError(f"{place}: message {number} has tool_calls without names; {_name_cures('tool_calls')}")
    if calls:
        parsed = [{**f, "arguments": _parse_call_arguments(f.get("arguments"))} for f in functions if f]
        wrapped = [call if "function" in call else {"type": "function"} for call in calls]
        kept["tool_calls"] = [{**call, "function": f} for call, f in zip(wrapped, parsed, strict=True)]
    return kept


def _parse_call_arguments(arguments: Any) -> Any:
    """Return the arguments of a call as a map, as templates read them, also if they are its text in JSON."""
    values = _parse_json_or_text(arguments) if isinstance(arguments, str) else arguments
    return values if isinstance(values, dict) else arguments or {}


def _is_skipped(message: Mapping[str, Any], number: int, place: str) -> bool:
    """Return True if a message says by its `weight`, or by `train`, that it is not learned. Raises ConfigError if it is
    none that could be, or for another weight than 0 and 1."""
    for name in (name for name in _WEIGHTS if name in message):
        if (value := message[name]) not in (0, 1):
            raise ConfigError(f"{place}: message {number} has {name}={shorten_value(value)}; nearest legal: 0, 1")
        if value == 1 and message["role"] != ANSWERS:
            reason = f"message {number} of role {message['role']} has {name}={shorten_value(value)}"
            raise ConfigError(f"{place}: {reason}, and only answers are learned; {_name_cures(name)}")
        if value == 0 and message["role"] == ANSWERS:
            return True
    return False


def _read_prompt_addition(values: Mapping[str, Any], data: Data, place: str) -> str:
    """Return the text that a data record adds to its prompt, "" for none. Raises ConfigError if it is no text, or if it
    is there and data.input_field does not say whether to add it. `place`: the record's, for the refusal."""
    name = data.input_field or ALPACA_INPUT
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


def _convert_sharegpt_roles(value: Any, place: str) -> Any:
    """Convert a conversation from ShareGPT's form (`from`, `value`) to roles and contents; return others as given.
    Raises ConfigError for a role that is not known, and for a call that is none."""
    is_sharegpt = isinstance(value, list) and all(isinstance(m, dict) and {"from", "value"} <= m.keys() for m in value)
    if not is_sharegpt or not all(isinstance(m["from"], str) for m in value):
        return value
    messages = []
    for number, message in enumerate(value):
        name, text = message["from"], message["value"]
        if name not in _SHAREGPT:
            reason = f"message {number} is from {shorten_value(name)}, which is no role"
            raise ConfigError(f"{place}: {reason}; nearest legal: human, gpt, system, {_CALL}, observation")
        converted = {k: v for k, v in message.items() if k not in ("from", "value")}
        converted |= {"role": _SHAREGPT[name], "content": text}
        if name == _CALL:
            calls = _parse_json_or_text(text) if isinstance(text, str) else text
            calls = calls if isinstance(calls, list) else [calls]
            if not all(isinstance(call, dict) and "name" in call for call in calls):
                reason = f"message {number} from {_CALL} is no call"
                raise ConfigError(f"{place}: {reason}; nearest legal: {json.dumps({'name': 'f', 'arguments': {}})}")
            converted |= {"content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}
        messages.append(converted)
    return messages
