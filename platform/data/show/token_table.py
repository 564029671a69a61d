"""Table of a sequence's tokens, one a line, with all that a rank gets of each."""

from __future__ import annotations

from collections.abc import Iterator

from platform.data.show.step_view import StepSequence, StepView
from platform.data.show.terminal_list import about, heading
from platform.data.show.token_texts import TokenTexts

_NAMES = {"labels": "learned", "label_weights": "weight"}


def table_of_tokens(view: StepView, positions: range) -> Iterator[str]:
    """Yield the lines of a table of the tokens of a step's sequences at `positions`, a column per data tensor."""
    texts = TokenTexts(view.corpus)
    yield from heading(view)
    for position in positions:
        for sequence in view.sequences(position, position + 1):
            yield about(sequence, view.taken.length)
            yield from _table_rows(sequence, texts)


def _table_rows(sequence: StepSequence, texts: TokenTexts) -> Iterator[str]:
    """Yield the lines of the table of one sequence: tensors of one length side by side."""
    lengths = dict.fromkeys(map(len, sequence.tensors.values()))
    for length in lengths:
        columns = [["place", *map(str, range(length))]]
        for name, values in sequence.tensors.items():
            if len(values) == length:
                columns.append([_NAMES.get(name, name), *("-" if v == -1 else f"{v:g}" for v in values.tolist())])
                if name in ("tokens", "labels", "source"):
                    spelled = iter(texts.texts([v for v in values.tolist() if v >= 0]))
                    columns.append(["text", *(f"'{next(spelled)}'" if v >= 0 else "" for v in values.tolist())])
        widths = [max(map(len, column)) for column in columns]
        for row in zip(*columns, strict=True):
            yield "  ".join(cell.ljust(n) if cell.startswith("'") or cell == "text" else cell.rjust(n)
                            for cell, n in zip(row, widths, strict=True)).rstrip()  # fmt: skip
