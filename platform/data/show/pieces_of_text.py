"""Pieces of text that show a sequence: its tokens in order, and which of them are read alone and which are learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from platform.data.show.step_view import StepSequence
from platform.data.show.token_texts import TokenTexts
from platform.data.tokens.streams import PADDING
from platform.plan.language.functions import LABEL_WEIGHTS

LEARNED, READ, HIDDEN, BORDER, NOTE = "learned", "read", "hidden", "border", "note"
TOKENS = (LEARNED, READ)  # kinds of a piece that is a token


class Fragment(NamedTuple):
    """Fragment of a line. `kind`: LEARNED for a predicted token, READ for one that is only read, HIDDEN for one that is
    read in the place of the learned token behind it, BORDER where a document begins, NOTE for a remark; `about`:
    more on a token, shown on request."""

    text: str
    kind: str
    about: str = ""


class _Token(NamedTuple):
    """Token of a line: with the weight of its prediction, None if it is not learned; the token that is read in its
    place, if it is another one; and True if a document begins with it."""

    id: int
    weight: float | None = None
    instead: int | None = None
    begins: bool = False


def lines_of(sequence: StepSequence, texts: TokenTexts, begin: int) -> dict[str, list[Fragment]]:
    """Return the pieces of a sequence: under "source" the encoder's, and under "" the pieces that are read and learned.
    `begin`: the id of the token that begins documents."""
    given, lines = sequence.tensors, {}
    if "source" in given:
        lines["source"] = [*_line_fragments([_Token(i) for i in given["source"].tolist()], texts)]
    follow = np.append(given["tokens"][1:], PADDING) == given["labels"]
    learned = given["labels"] >= 0
    form = _one_text if 2 * (follow & learned).sum() >= learned.sum() else _in_place
    return lines | {"": [*_line_fragments([*form(given, begin)], texts)]}


def _label_weights(given: Mapping[str, Any]) -> list[float | None]:
    """Return the weight in the loss of the label at each place of a sequence, None where none is predicted."""
    weights = given.get(LABEL_WEIGHTS, np.ones(len(given["labels"])))
    return [w if label >= 0 else None for label, w in zip(given["labels"].tolist(), weights.tolist(), strict=True)]


def _borders(given: Mapping[str, Any], begin: int) -> list[bool]:
    """Return True for each token of a sequence with which a document begins, as far as the sequence shows it."""
    tokens, place = given["tokens"], np.arange(len(given["tokens"]))
    if "source" in given:  # a decoder's, whose first token and last label are none of a document
        return [False] * len(tokens)
    found = (tokens == begin) & (begin >= 0)
    if "begins" in given:
        found |= (given["begins"] == place) & (place > 0) & (tokens >= 0)
    return [bool(x) for x in found]


def _one_text(given: Mapping[str, Any], begin: int) -> Iterator[_Token]:
    """Yield the tokens of a sequence whose labels are the tokens that follow: both are one text. A label that is not
    the next token, as at the end, stands between the two."""
    labels, weights, borders = given["labels"].tolist(), _label_weights(given), _borders(given, begin)
    ends = begin if "source" not in given else PADDING
    wanted = PADDING
    for i, token in enumerate(given["tokens"].tolist()):
        if i and wanted != PADDING and wanted != token:
            yield _Token(wanted, weights[i - 1], None, wanted == ends)
        yield _Token(token, weights[i - 1] if i and wanted == token else None, None, borders[i])
        wanted = labels[i]
    if wanted != PADDING:
        yield _Token(wanted, weights[-1], None, wanted == ends)


def _in_place(given: Mapping[str, Any], begin: int) -> Iterator[_Token]:
    """Yield the tokens of a sequence whose labels belong in the places of the tokens that are read there."""
    values = given["tokens"].tolist(), given["labels"].tolist(), _label_weights(given), _borders(given, begin)
    rows = zip(*values, strict=True)
    for token, label, weight, begins in rows:
        if weight is None:
            yield _Token(token, begins=begins)
        else:
            yield _Token(label, weight, None if token == label else token, begins)


def _line_fragments(tokens: Sequence[_Token], texts: TokenTexts) -> Iterator[Fragment]:
    """Yield the pieces that show the tokens of a line; padding is counted alone."""
    there = [token for token in tokens if token.id != PADDING]
    spelled = texts.texts([token.id for token in there])
    read = texts.texts([token.id if token.instead is None else token.instead for token in there])
    weight: float | None = 1.0
    for place, (token, text, instead) in enumerate(zip(there, spelled, read, strict=True)):
        if token.begins:
            yield Fragment("▌", BORDER, "a document begins")
        if token.weight is not None and token.weight != weight:
            yield Fragment(f"⟨weight {token.weight:g}⟩", NOTE)
            weight = token.weight
        about = f"token {token.id}, place {place}"
        if token.instead is not None:
            yield Fragment(instead, HIDDEN, f"token {token.instead} is read here")
        if token.weight is None:
            yield Fragment(text, READ, f"{about}: read, not learned")
        else:
            yield Fragment(text, LEARNED, f"{about}: learned, weight {token.weight:g}")
    if padding := len(tokens) - len(there):
        yield Fragment(f" ({padding} of padding)", NOTE)
