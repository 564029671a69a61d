"""Conversations that each chat template is asked to write, and the names of special tokens."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TEMPLATES, ANSWERS = HERE / "templates.json.xz", HERE / "answers.json"
DAY = "2025-06-26"
NAMED = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>"}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "its name"}}},
}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
HOW_MANY = {"role": "user", "content": "How many are two and two?"}
FOUR = {"role": "assistant", "content": "They are four."}
MORE = {"role": "user", "content": "And three more?"}
SEVEN = {"role": "assistant", "content": "Seven, then."}
TALKS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([HOW_MANY, FOUR], None),
    "two turns": ([HOW_MANY, FOUR, MORE, SEVEN], None),
    "system": ([{"role": "system", "content": "Count well."}, HOW_MANY, FOUR], None),
    "tools": (
        [
            {"role": "user", "content": "Is it sunny in Rome?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "sunny"},
            {"role": "assistant", "content": "It is sunny."},
        ],
        TOOLS,
    ),
    "thinking": (
        [
            *(HOW_MANY, FOUR | {"reasoning_content": "Two pairs make four."}),
            *(MORE, SEVEN | {"reasoning_content": "Four and three."}),
        ],
        None,
    ),
}


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with their contents in parts, as templates of models that see images want them."""
    return [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]


def read_kept() -> tuple[dict[str, str], bytes, dict[str, dict[str, Any]]]:
    """Return the templates by name, a tokenizer.json with their special tokens, and the answers kept of transformers:
    template -> conversation -> null if it refuses, else hashes of the text and of (ids, mask), the marks, if parts."""
    kept = json.loads(lzma.decompress(TEMPLATES.read_bytes()))
    return kept["templates"], kept["tokenizer"].encode(), json.loads(ANSWERS.read_text())
