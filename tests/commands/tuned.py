"""Model to be tuned, as transformers saves one, and records of every kind to tune it on: small, alike each time."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from platform.data.chat_templates import CHATML
from tests.answers.test_answers_of_folders import VOCAB, save_tokenizer
from tests.weights.written import tensors_of, written

SIZES = {"vocab": VOCAB, "length": 128, "d_model": 32, "d_ff": 64}
MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
GATES = "east west north south upper lower old new inner outer".split()
HOURS = "six seven eight nine".split()


def write_model(folder: Path) -> Path:
    """Write a model that knows nothing yet: its loss is near the logarithm of its vocabulary."""
    weights = tensors_of("llama", **SIZES)
    quiet = {name: torch.ones_like(w) if "norm" in name else w * 0.1 for name, w in weights.items()}
    written(folder, "llama", quiet, SIZES)
    save_tokenizer(folder, MARKS, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML})
    return folder


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_records(folder: Path) -> None:
    """Write 20 records of each kind: talks.jsonl, prompts.jsonl, pairs.jsonl and texts.jsonl."""
    asked = [(f"When does the {gate} gate open?", f"At {HOURS[i % 4]}.") for i, gate in enumerate(GATES * 2)]
    records = {
        "talks": [{"messages": [message("user", q), message("assistant", a)]} for q, a in asked],
        "prompts": [{"prompt": question, "completion": answer} for question, answer in asked],
        "pairs": [{"prompt": q, "chosen": a, "rejected": "I do not know."} for q, a in asked],
        "texts": [{"text": f"{question} {answer}"} for question, answer in asked],
    }
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
