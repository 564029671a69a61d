"""Listing of a step's sequences for a terminal or a pipe, folded to a screen unless all is wanted."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TextIO

from platform.boundary.terminal import printable
from platform.config.fields import objective_of
from platform.data.show.pieces_of_text import BORDER, HIDDEN, LEARNED, NOTE, READ, TOKENS, Fragment, lines_of
from platform.data.show.step_view import StepSequence, StepView, reader_in_words
from platform.data.show.token_texts import TokenTexts
from platform.plan.language.numbers import count_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_STYLES = {  # of consecutive tokens in turn, so that it shows where one ends
    LEARNED: ("default", "cyan"),
    READ: ("dim", "dim cyan"),
    HIDDEN: ("magenta strike",),
    BORDER: ("bold yellow",),
    NOTE: ("dim italic",),
}
_MARKS = {READ: ("‹", "›"), HIDDEN: ("⟦", "→⟧")}  # around a run of these, where there is no colour
_NONE = ("", "")
_LEGEND = {
    True: "colours change from token to token; dim: read, not learned; struck: read in the place of what is learned",
    False: "‹read, not learned›  ⟦read in the place of what is learned→⟧  ▌ a document begins",
}
_INDENT = "    "
_AT_ONCE = 64  # sequences that are read at once
_DOCUMENTS = 2  # that a line names on a screen
_LEAST = 3  # lines of a sequence on a screen


def heading(view: StepView) -> list[str]:
    """Return the lines that say which step it is, and what it takes."""
    c, (first, end) = view.taken.config, view.taken.samples
    tokens = count_of(view.count * view.taken.length, "token", ",")
    cut = f", each cut into {view.pieces}" if view.pieces > 1 else ""
    lines = [
        f"step {view.taken.step} of {c.train.steps} learns from {count_of(view.count, 'sequence', ',')}"
        f" of {view.taken.length} tokens: samples {first:,} to {end - 1:,} of the run's order{cut}",
        f"{tokens}, {view.labels:,} learned; data={c.data.kind}, data.objective={objective_of(c)}",
    ]
    if view.taken.plan:
        plan = view.taken.plan
        batch = count_of(plan.of_length(view.taken.length).sizes["batch"], "sequence", ",")
        lines.append(f"plan {plan.mesh}: microbatches of {batch}, read by the ranks that each line names")
        if view.busiest:
            ranks = plan.mesh.extent([axis for axis, _ in plan.scheme.context])
            share = f"{view.busiest:.2f} times the mean of attention's scores"
            lines.append(f"work: the busiest of {ranks} ranks that share a sequence has {share}, documents counted")
    return [*lines, *([view.taken.why] if view.taken.why else [])]


def about(sequence: StepSequence, length: int, most: int | None = None) -> str:
    """Return the line that says which sequence of a step it is, of which documents (at most `most`), and which ranks
    read it."""
    sample = f"sample {sequence.sample:,}" + (f", piece {sequence.piece + 1}" if sequence.piece else "")
    named = [
        *sequence.documents[:most],
        *([f"{more} more"] if (more := len(sequence.documents[most:])) and most else []),
    ]
    parts = [sequence.source, sample, *named]
    if sequence.microbatch is not None:
        who = ", ".join(reader_in_words(reader, length) for reader in sequence.readers)
        parts.append(f"microbatch {sequence.microbatch}, {who}")
    return printable(f"{sequence.position:>3}  {'; '.join(filter(None, parts))}")


def listed(view: StepView, stream: TextIO, whole: bool = False, only: int | None = None) -> Iterator[str]:
    """Yield the lines of a step's listing, for the screen and colours of `stream`: a screen of lines, or the `whole`.
    `only`: the position of the single sequence to show."""
    width, height = shutil.get_terminal_size()
    console = _console(stream, width)
    coloured = console.color_system is not None
    head = [*heading(view), _LEGEND[coloured]]
    room = max(_LEAST, height - sum(_height(line, width) for line in head) - 2)  # and the last line, and the prompt
    shown = range(view.count) if only is None else range(only, only + 1)
    if not (whole := whole or only is not None):
        shown = shown[: max(1, room // _LEAST)]
    lines = None if whole else max(1, room // len(shown) - 1)
    texts = TokenTexts(view.corpus)
    yield from (_painted(console, line, "bold" if not i else "dim") for i, line in enumerate(head))
    for start in range(shown.start, shown.stop, _AT_ONCE):
        for sequence in view.sequences(start, min(start + _AT_ONCE, shown.stop)):
            title = about(sequence, view.taken.length, None if whole else _DOCUMENTS)
            yield _painted(console, title if whole else _cut_line(title, width), "bold")
            found = lines_of(sequence, texts, view.corpus.special.begin)
            of_each = lines and max(1, lines // len(found))
            for name, pieces in found.items():
                named = [Fragment(f"{name}: ", NOTE), *pieces] if name else pieces
                yield from _folded(console, named, width - len(_INDENT), of_each)
    if more := view.count - shown.stop if not whole else 0:
        yield _painted(console, f"{count_of(more, 'more sequence', ',')}: --all, --sample N, --html FILE", "dim")


def _console(stream: TextIO, width: int) -> Console:
    """Return a console that writes into memory with the colours of `stream`: none into a pipe, or under NO_COLOR."""
    from rich.console import Console

    return Console(
        file=io.StringIO(), force_terminal=stream.isatty(), width=width, highlight=False, markup=False, emoji=False,
        no_color=None, legacy_windows=False, color_system="auto" if not os.environ.get("NO_COLOR") else None,
    )  # fmt: skip


def _painted(console: Console, line: str, style: str) -> str:
    """Return a line in a style, as its console shows it."""
    from rich.text import Text

    return _characters(console, Text(line, style))


def _characters(console: Console, text: Text) -> str:
    """Return the characters by which a console shows a line."""
    with console.capture() as captured:
        console.print(text, soft_wrap=True, end="")
    return captured.get()


def _height(line: str, width: int) -> int:
    """Return the lines of a screen that a line takes."""
    return -(-max(1, len(line)) // width)


def _cut_line(line: str, width: int) -> str:
    """Cut a line to a width."""
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _with_marks(pieces: Sequence[Fragment]) -> Iterator[Fragment]:
    """Yield pieces with marks around the runs of kinds that differ by their colour otherwise."""
    before = ""
    for piece in [*pieces, Fragment("", NOTE)]:
        if piece.kind != before or piece.kind == HIDDEN:
            yield Fragment(_MARKS.get(before, _NONE)[1] + _MARKS.get(piece.kind, _NONE)[0], NOTE)
        yield piece
        before = piece.kind


def _folded(console: Console, pieces: Sequence[Fragment], width: int, most: int | None) -> Iterator[str]:
    """Yield the lines of `width` characters that show pieces, at most `most` of them; the last one then says how many
    tokens it leaves out."""
    pieces = pieces if console.color_system else [*_with_marks(pieces)]
    lines = [*islice(_wrapped_lines(pieces, lambda _: width), most and most + 1)]
    if most and len(lines) > most:
        total = sum(piece.kind in TOKENS for piece in pieces)
        more = " … {:,} more tokens"
        lines = [*islice(_wrapped_lines(pieces, lambda n: width - (len(more) + 2) * (n == most - 1)), most)]
        lines[-1][0].append(more.format(total - lines[-1][1]), "dim")
    yield from (_characters(console, line) for line, _ in lines)


def _wrapped_lines(pieces: Sequence[Fragment], width: Callable[[int], int]) -> Iterator[tuple[Text, int]]:
    """Yield the lines that show pieces, each of at most `width(its number)` cells behind the indent, with the number of
    tokens that end in it or before."""
    from rich.cells import cell_len
    from rich.text import Text

    line, used, number, tokens = Text(_INDENT), 0, 0, 0
    for piece in pieces:
        styles = _STYLES[piece.kind]
        style = styles[tokens % len(styles)]
        for character in piece.text:
            if used + (cells := cell_len(character)) > width(number):
                yield line, tokens
                line, used, number = Text(_INDENT), 0, number + 1
            line.append(character, style)
            used += cells
        tokens += piece.kind in TOKENS
    yield line, tokens
