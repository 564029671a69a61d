"""Synthetic tokens, for benchmarks: token t of a stream is a hash of (seed, stream, t)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from platform.data.permutation import mix


@dataclass(frozen=True)
class RandomTokens:
    """Endless stream of uniform random tokens in [0, vocab), chosen by `seed` and `number`; indexed like an array."""

    seed: int
    number: int
    vocab: int

    def __len__(self) -> int:
        """Return the number of tokens in this stream of random tokens, practically endless: 2^40."""
        return 1 << 40

    def __getitem__(self, index: NDArray[np.int64]) -> NDArray[Any]:
        """Return the random token ids at positions `index`, each a hash of seed, split and position."""
        return mix(self.seed, self.number, index) % np.uint64(self.vocab)


def encode_bytes(text: str, vocab: int) -> list[int]:
    """Encode a prompt for a model of synthetic tokens: the text's UTF-8 bytes as ids, modulo the vocabulary."""
    return [byte % vocab for byte in text.encode()]


def show_ids(ids: Sequence[int]) -> str:
    """Return synthetic token ids, which stand for no text, as printable placeholders: "<5> <17>"."""
    return " ".join(f"<{i}>" for i in ids)
