"""Table of losses: per token, word and byte of each held-out text, and as perplexities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from platform.boundary.terminal import phase
from platform.cluster.generation.asked_model import Ask
from platform.data.corpus import Corpus
from platform.data.tokens.streams import PairStream

AT_ONCE = 64  # samples whose text is counted at a time


@dataclass(frozen=True)
class Measured:
    """Loss of a model on a text: `nats`, the sum over its predicted `tokens`, which are `words` and `bytes`; 0 of these
    if the text has no tokenizer."""

    source: str
    nats: float
    tokens: int
    words: int
    size: int
    samples: int

    def plain(self) -> dict[str, Any]:
        """Return a row of the table of a model's losses as plain data: source, samples, loss, the numbers of tokens,
        words and bytes, the perplexity per each, and bits per byte; None where words or bytes are unknown."""
        per = {"token": self.tokens, "word": self.words, "byte": self.size}
        found: dict[str, Any] = {"source": self.source, "samples": self.samples, "loss": self.nats / self.tokens}
        for unit, count in per.items():
            found[f"{unit}s"] = count or None
            found[f"perplexity_per_{unit}"] = _perplexity(self.nats, count) if count else None
        found["bits_per_byte"] = self.nats / math.log(2) / self.size if self.size else None
        return found


def _perplexity(nats: float, count: int) -> float | None:
    """Return the perplexity e^(nats / count) of a trained model on a text, None if that is no finite number."""
    try:
        return math.exp(nats / count)
    except OverflowError:
        return None


def measure_losses(ask: Ask, corpus: Corpus, splits: Mapping[str, str], most: int) -> list[Measured]:
    """Measure a trained model's loss on held-out text. `ask`: calls its workers; `splits`: source -> split of the
    corpus; `most`: samples of each split to evaluate, 0 for all."""
    samples = {split: min(there := corpus.samples_of(split), most or there) for split in splits.values()}
    losses, rows = ask("evaluate", samples)[0], []
    for name, split in splits.items():
        tokens = corpus.predicted(split, 0, samples[split])
        units = units_of(corpus, split, samples[split])
        rows.append(Measured(name, losses[split] * tokens, tokens, *units, samples[split]))
    return rows


def units_of(corpus: Corpus, split: str, samples: int) -> tuple[int, int]:
    """Count the words, between spaces, and the bytes of the held-out text on which a model's loss is measured: what the
    labels of a split's first samples spell, without special tokens; zeros if the corpus has no tokenizer."""
    vocabulary = corpus.vocabulary
    if vocabulary is None:
        return 0, 0
    apart = isinstance(next(iter(corpus.parts[0].streams.values())), PairStream)
    words = size = 0
    inside = False  # a word goes on from the samples before
    with phase("counting words", samples, "sequences") as shown:
        for first in shown.each(range(0, samples, AT_ONCE), lambda first: min(AT_ONCE, samples - first)):
            labels = corpus.batch(split, first, min(first + AT_ONCE, samples))["labels"]
            texts = [corpus.decode(row[row >= 0].tolist()) for row in (labels if apart else [labels.reshape(-1)])]
            text = ("\n" if apart else "").join(texts)
            spelled = text
            for token in vocabulary.special_tokens:
                text, spelled = text.replace(token, ""), spelled.replace(token, "\n")
            size += len(text.encode(errors="replace")) - apart * (len(texts) - 1)
            words += len(spelled.split()) - (inside and bool(spelled) and not spelled[0].isspace())
            inside = not apart and (not spelled[-1].isspace() if spelled else inside)
    return words, size


def print_losses(rows: Sequence[Measured], say: Callable[[str], None]) -> None:
    """Print the table of a model's losses and perplexities per token, word and byte, a row per held-out text."""
    say(
        f"{'source':<20} {'tokens':>12} {'loss':>9} {'per token':>11} {'per word':>12} {'per byte':>9} {'bits/byte':>9}"
    )
    for row in rows:
        found = row.plain()
        cells = [found[f"perplexity_per_{unit}"] for unit in ("token", "word", "byte")]
        token, word, byte = ("-" if x is None else f"{x:.5g}" for x in cells)
        bits = "-" if found["bits_per_byte"] is None else f"{found['bits_per_byte']:.4f}"
        head = f"{row.source or '-':<20} {row.tokens:>12,} {found['loss']:>9.4f}"
        say(f"{head} {token:>11} {word:>12} {byte:>9} {bits:>9}")
