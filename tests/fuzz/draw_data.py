"""Draw data: where a run's samples come from, in tiny files that are written once, and what is predicted in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from platform.config.fields import Config, Data
from platform.data.corpus import open_run_corpus
from platform.data.mixture import hash_integers
from platform.data.objectives import Causal, Ints, Keys, SampleShape
from platform.data.tokenizer import SMALLEST
from tests.harness.oracle import Tokens

WEIGHED = "weighed"  # an objective whose labels have weights
KINDS = ("decoder", "encoder", "encoder_decoder")
WEIGHTS = np.array([1.0, 0.1, 0.0, 3.0, -0.2])
WORDS = ("one", "two", "wolf", "sheep", "and", "of", "the", "house")
BLOCK = 100  # characters or tokens: the smallest legal block of a stream, so that a run reads several


@dataclass(frozen=True)
class Weighed(Causal):
    """Some labels count less, some not at all, some the other way."""

    def batch(self, stream: Any, index: Ints, keys: Keys) -> dict[str, Any]:
        lot = hash_integers(keys[:, None], 9, np.arange(self.length)) % np.uint64(len(WEIGHTS))
        return super().batch(stream, index, keys) | {"label_weights": WEIGHTS[lot.astype(np.int64)]}


def weighed(shape: SampleShape) -> Weighed:
    return Weighed(shape.length, shape.special, shape.document_mask)


def write_files(folder: Path) -> None:
    """Write the files that data may be drawn from: documents of tokens below 3 and below 5, pairs, conversations."""
    r = Random(0)

    def words(most: int) -> str:
        return " ".join(r.choices(WORDS, k=r.randint(1, most)))

    def tokens(below: int) -> dict[str, Any]:
        return {"tokens": [r.randrange(below) for _ in range(r.randint(1, 9))]}

    files: dict[str, Callable[[], dict[str, Any]]] = {
        "three": lambda: tokens(3),
        "five": lambda: tokens(5),
        "pairs": lambda: {"text": words(5), "target": words(5)},
        "asked": lambda: {"text": words(3), "target": words(6)},
    }
    for name, make in files.items():
        rows = [json.dumps(make()) for _ in range(200)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def _tokens(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    return {"kind": "tokens", "path": str(folder / f"{name}.jsonl"), "field": "tokens", "validation": 0.0, **keys}


def _mixture(r: Random, folder: Path) -> dict[str, Any]:
    """Draw two sources or three, of which some are streamed."""
    weights = [r.choice((0.2, 1.0, 3.0)) for _ in range(r.choice((2, 2, 3)))]
    sources = {
        f"s{i}": _tokens(folder, r.choice(("three", "five")), weight=weight, streaming=r.random() < 0.4)
        for i, weight in enumerate(weights)
    }
    return {"kind": "mixture", "sources": sources, "block": BLOCK}


Draw = Callable[[Random, Path], dict[str, Any]]
INVENTED: Draw = lambda r, folder: {}  # noqa: E731  the samples of tests.harness.oracle.Tokens
SOURCES: dict[str, Draw] = {
    "invented": INVENTED,
    "synthetic": lambda r, folder: {"kind": "synthetic"},
    "tokens": lambda r, folder: _tokens(folder, r.choice(("three", "five"))),
    "stream": lambda r, folder: _tokens(folder, r.choice(("three", "five")), streaming=True, block=BLOCK),
    "mixture": _mixture,
}
TEXTUAL: dict[str, tuple[str, Draw]] = {  # for one kind of model each
    "pairs": ("encoder_decoder", lambda r, folder: {"kind": "pairs", "path": str(folder / "pairs.jsonl")}),
    "instructions": ("decoder", lambda r, folder: {"kind": "instructions", "path": str(folder / "asked.jsonl")}),
}


def draw_data(r: Random, configs: Sequence[Config], folder: Path) -> None:
    """Draw the data of a run, alike for all of its plans, and whether its documents are kept apart and packed."""
    model = configs[0].model
    textual = [name for name, (kind, _) in TEXTUAL.items() if kind == model.kind]
    name = r.choice((*["invented"] * 4, *SOURCES, "stream", "mixture", *textual * 3))
    data = Data(**(TEXTUAL[name][1] if name in TEXTUAL else SOURCES[name])(r, folder), cache=str(folder / "cache"))
    decodes = model.kind == "decoder"
    if decodes and name != "synthetic":
        data.document_mask = r.random() < 0.4
        if name != "invented" and r.random() < 0.3:
            data.packing, data.overlong = "best_fit", r.choice(("split", "cut", "drop"))
    if model.kind != "two_layer" and not model.label_smoothing and (decodes or name == "invented"):
        data.objective = r.choice(("", "", WEIGHED))
    for c in configs:
        c.data, c.model.within_documents = replace(data), data.document_mask
        c.model.vocab += SMALLEST * (name in TEXTUAL)


def open_data(c: Config) -> Any:
    """Open the corpus of a drawn configuration. Raises ConfigError where it has no sample."""
    return Tokens(c) if c.data.kind in (Data().kind, "preferences") else open_run_corpus(c)
