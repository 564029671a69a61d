"""Texts that tokenizers are compared on: random ones, odd ones, and Python's own sources."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

ODD = ("", " ", "  ", "a", " a", "x\ny\tz\r\n", "<s> a</s> b", "<|endoftext|> x<|im_end|>", "▁ ▁a", "日本語 🎉ﬁ",
       "ab<sep>cd ab", "I'll we'VE 12345 1 22", "\u3000\u00a0é e\u0301")  # fmt: skip
_LETTERS = "abcdeABC'sSll  \n\r\t<>|/.,;é日本語🎉ﬁ１２９0123▁\u3000\u00a0 def class the   "


def sources(first: int, last: int) -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[first:last]
    return [file.read_text(errors="ignore") for file in files]


def texts(count: int = 400) -> list[str]:
    draw = random.Random(0)
    drawn = ["".join(draw.choice(_LETTERS) for _ in range(draw.randint(1, 40))) for _ in range(count)]
    return [*ODD, *drawn, *sources(60, 64)]
