"""Texts of single tokens, which joined end to end are the text of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from platform.boundary.terminal import printable
from platform.data.corpus import Corpus

_HALF = "\ufffd"  # of a character whose bytes are in several tokens
_SIGNS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


class TokenTexts:
    """Texts of a corpus's tokens, which are safe for any terminal: ends of lines are signs, unprintable characters are
    escaped."""

    def __init__(self, corpus: Corpus):
        """Prepare to look up the texts of the tokens of a corpus."""
        self._corpus = corpus
        self._named: Mapping[int, str] = getattr(corpus.objective, "names", {})
        self._known: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each of consecutive tokens; where several tokens have the bytes of one character, all of
        its text belongs to the last of them."""
        found = [self._text_behind(i) for i in ids]
        start = 0
        for end in range(1, len(ids) + 1):
            if end < len(ids) and _HALF in found[end]:
                continue
            if end - start > 1 and _HALF in found[start]:
                found[start:end] = [""] * (end - start - 1) + [self._behind(ids[start:end])]
            start = end
        return [_with_signs(text) for text in found]

    def _text_behind(self, number: int) -> str:
        """Return the text that a token adds to another one before it."""
        if (text := self._known.get(number)) is None:
            text = self._behind([number]) or self._named.get(number) or f"<{number}>"
            self._known[number] = text
        return text

    def _behind(self, ids: Sequence[int]) -> str:
        """Return the text that tokens add to another one before them; a tokenizer may drop a space at the beginning."""
        return self._corpus.decode([*self._anchor, *ids]).removeprefix(self._corpus.decode(self._anchor))

    @cached_property
    def _anchor(self) -> list[int]:
        """Return a token that texts are looked up behind; none for tokens without a tokenizer."""
        return self._corpus.encode("a")[-1:] if self._corpus.vocabulary else []


def _with_signs(text: str) -> str:
    """Return a token's text in one line, with signs in the place of ends of lines and tabs."""
    return printable("".join(_SIGNS.get(c, c) for c in text))
