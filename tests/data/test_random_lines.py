"""Random lines of conversations: each is rendered and learned as its template says, or refused in one line."""

import json
import os
import random

import jinja2
import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data.chat_templates import CHATML, ChatTemplate
from platform.data.conversations import read_instructions
from platform.data.data_files import find_data_files

LINES = int(os.environ.get("RANDOM_LINES", "500"))  # 5,000 take half a minute
SPECIAL = ["<|im_start|>", "<|im_end|>"]
PIECES = [
    *("four", " ", "\n", "\t", "é", "\u2028", "\u0000", "🐑", "{{ x }}", "{% if %}", "</s>", "assistant", "user\n"),
    *(
        "1e5",
        *SPECIAL,
        "<|im_",
        "end|>",
        '"',
        "\\",
        "'",
        "null",
        "\r\n",
        "\x85",
        "\ufeff",
        "\ud7ff",
        "a" * 40,
        "false",
        "",
    ),
]
ROLES = ["system", "user", "assistant", "user", "assistant", "tool", "critic", "", "Assistant"]


def draw_text(chance):
    return "".join(chance.choices(PIECES, k=chance.randrange(1, 6)))


def draw_odd(chance):
    """A value that no text is, or that looks like what a field may hold."""
    text, number = draw_text(chance), chance.choice([5, 0, True, float("inf"), -1.5])
    calls = [[{"function": text}], [{"name": text, "arguments": number}], [[text]], {"name": number}, [None]]
    parts = [[{"type": "text", "text": text}], [{"type": "text", "text": number}], [{"type": ["image"]}], [text]]
    return chance.choice([None, number, [], {}, *parts, *calls, {"text": text}, text])


def draw_other_line(chance):
    """A record of another form than messages, one in two with something that it should not hold."""
    text = lambda: draw_text(chance)  # noqa: E731
    names = ["human", "gpt", "system", "function_call", "observation", "tool"]
    talk = [{"from": chance.choice(names), "value": text()} for _ in range(chance.randrange(1, 5))]
    record = chance.choice([
        {"conversations": talk, "system": text(), "tools": text()}, {"conversations": talk},
        {"prompt": text(), "completion": text()}, {"instruction": text(), "input": text(), "output": text()},
        {"prompt": [{"role": "user", "content": text()}], "completion": [{"role": "assistant", "content": text()}]},
        {"messages": [{"role": "assistant", "content": text(), "reasoning_content": text(), "tool_calls": []}]},
    ])  # fmt: skip
    if chance.random() < 0.5:
        place = chance.choice([record, *(value[0] for value in record.values() if isinstance(value, list))])
        place[chance.choice([*place, "tools", "weight", "tool_calls"])] = draw_odd(chance)
    return record


def draw_line(chance):
    """A record of messages, one in four with something that no conversation has."""
    text = lambda: draw_text(chance)  # noqa: E731
    messages = [{"role": "user", "content": text()}]
    for _ in range(chance.randrange(1, 5)):
        messages.append({"role": chance.choice(ROLES), "content": text()})
    if chance.random() < 0.25:
        place = chance.choice(["content", "role", "tool_calls", "weight", "train", "name", "function_call"])
        chance.choice(messages)[place] = draw_odd(chance)
    record = {"messages": messages}
    if chance.random() < 0.05:
        record[chance.choice(["tools", "system", "functions", "id"])] = chance.choice([None, [], text(), {"a": 1}])
    return record


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(CHATML, {"end": "<|im_end|>"}, SPECIAL)


def test_lines_are_learned_as_written_or_refused(tmp_path, template):
    """The reference is jinja2 itself and a mask of whole answers. A special token that a message spells is none."""
    reference = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHATML)
    chance, path, counts = random.Random(5), tmp_path / "r.jsonl", {"learned": 0, "refused": 0}
    data = Data(kind="instructions", path=str(path), field="messages", chat_template="chatml")
    for number in range(LINES):
        record = draw_line(chance)
        path.write_text(json.dumps(record, ensure_ascii=number % 2 == 0) + "\n", encoding="utf-8")
        try:
            files = find_data_files("data.path", str(path))
            instructions = [instruction for _, instruction in read_instructions(files, data)]
            parts = [template.render_parts(i.messages, i.tools, i.skipped) for i in instructions]
        except ConfigError as error:
            counts["refused"] += 1
            assert len(error.violations) == 1 and error.violations[0].isprintable(), (record, error.violations)
            continue
        for instruction, parts_of_text in zip(instructions, parts, strict=True):
            messages = [message | {"content": text_of(message)} for message in instruction.messages]
            assert "".join(text for text, *_ in parts_of_text) == reference.render(messages=messages), record
            answers = [m["content"] for i, m in enumerate(messages) if i not in instruction.skipped and is_answer(m)]
            learned = "".join(text for text, _, is_learned in parts_of_text if is_learned)
            assert learned == "".join(f"{answer}<|im_end|>\n" for answer in answers), record
            count = sum(special for _, special, _ in parts_of_text)
            assert count == 2 * len(messages), record
            counts["learned"] += 1
    assert min(counts.values()) > LINES // 10, counts


def test_lines_of_other_forms_are_read_or_refused(tmp_path, template):
    """The class of a message whose calls were no list: a field of another type is a line, and no other error."""
    chance, path, counts = random.Random(6), tmp_path / "r.jsonl", {"read": 0, "refused": 0}
    for _ in range(LINES):
        path.write_text(json.dumps(record := draw_other_line(chance)) + "\n")
        data = Data(kind="instructions", path=str(path), field="messages", chat_template="chatml")
        try:
            for _, i in read_instructions(find_data_files("data.path", str(path)), data):
                learned = [text for text, _, is_learned in template.render_parts(i.messages, i.tools, i.skipped)
                           if is_learned]  # fmt: skip
                assert learned or i.skipped, record
            counts["read"] += 1
        except ConfigError as error:
            counts["refused"] += 1
            assert len(error.violations) == 1 and error.violations[0].isprintable(), (record, error.violations)
    assert min(counts.values()) > LINES // 10, counts


def is_answer(message):
    return message["role"] == "assistant"


def text_of(message):
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
