"""Listing of a step's sequences: for a terminal or a pipe, folded to a screen unless all is wanted (`list_sequences`);
as a table of one token a line, with all that a rank gets of each (`format_token_table`); or as a page of HTML that
loads and runs nothing (`render_step_page`). A `Fragment` is a piece of text, read alone or learned."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np

from platform.boundary.redaction import redact_secrets
from platform.boundary.terminal import escape_unprintable
from platform.config.fields import PREFERENCE, training_objective_name
from platform.data.html_head import html_head, policy_hash
from platform.data.step_view import StepSequence, StepView, TokenTexts, describe_reader
from platform.data.streams import PADDING
from platform.plan.layout import format_count
from platform.plan.model_types import LABEL_WEIGHTS, PAIRED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


LEARNED, READ, HIDDEN, BORDER, NOTE = "learned", "read", "hidden", "border", "note"
TOKENS = (LEARNED, READ)  # kinds of a piece that is a token


class Fragment(NamedTuple):
    """Fragment of a line. `kind`: LEARNED for a predicted token, READ for one that is only read, HIDDEN for one that is
    read in the place of the learned token behind it, BORDER where a document begins, NOTE for a remark; `about`:
    more on a token, shown on request."""

    text: str
    kind: str
    about: str = ""


_PLAIN = "weight 1"  # of a label, which goes without saying


class _Token(NamedTuple):
    """Token of a line: with what its prediction counts, in words, None if it is not learned; the token that is read in
    its place, if it is another one; and True if a document begins with it."""

    id: int
    weight: str | None = None
    instead: int | None = None
    begins: bool = False


def build_sequence_fragments(sequence: StepSequence, texts: TokenTexts, begin: int) -> dict[str, list[Fragment]]:
    """Return the pieces of a sequence: under "source" the encoder's, and under "" the pieces that are read and learned.
    `begin`: the id of the token that begins documents."""
    tensors, lines = sequence.tensors, {}
    if "source" in tensors:
        lines["source"] = [*_line_fragments([_Token(i) for i in tensors["source"].tolist()], texts)]
    follow = np.append(tensors["tokens"][1:], PADDING) == tensors["labels"]
    learned = tensors["labels"] >= 0
    form = _merge_following_labels if 2 * (follow & learned).sum() >= learned.sum() else _merge_aligned_labels
    return lines | {"": [*_line_fragments([*form(tensors, begin)], texts)]}


def _loss_weights_by_place(tensors: Mapping[str, Any]) -> list[str | None]:
    """Return the weight in the loss of the label at each place, or its side of a pair, in words; None without one."""
    weights = tensors.get(LABEL_WEIGHTS, np.ones(len(tensors["labels"]))).tolist()
    words = [f"weight {weight:g}" for weight in weights]
    if PAIRED in tensors:
        words = ["rejected" if answer % 2 else "chosen" for answer in tensors[PAIRED].tolist()]
    return [word if label >= 0 else None for label, word in zip(tensors["labels"].tolist(), words, strict=True)]


def _mark_document_borders(tensors: Mapping[str, Any], begin: int) -> list[bool]:
    """Return True for each token of a sequence with which a document begins, as far as the sequence shows it."""
    tokens, place = tensors["tokens"], np.arange(len(tensors["tokens"]))
    if "source" in tensors:  # a decoder's, whose first token and last label are none of a document
        return [False] * len(tokens)
    borders = (tokens == begin) & (begin >= 0)
    if "begins" in tensors:
        borders |= (tensors["begins"] == place) & (place > 0) & (tokens >= 0)
    return [bool(x) for x in borders]


def _merge_following_labels(tensors: Mapping[str, Any], begin: int) -> Iterator[_Token]:
    """Yield the tokens of a sequence whose labels are the tokens that follow: both are one text. A label that is not
    the next token, as at the end, stands between the two."""
    labels, weights = tensors["labels"].tolist(), _loss_weights_by_place(tensors)
    borders = _mark_document_borders(tensors, begin)
    ends = begin if "source" not in tensors else PADDING
    next_label = PADDING
    for i, token in enumerate(tensors["tokens"].tolist()):
        if i and next_label != PADDING and next_label != token:
            yield _Token(next_label, weights[i - 1], None, next_label == ends)
        yield _Token(token, weights[i - 1] if i and next_label == token else None, None, borders[i])
        next_label = labels[i]
    if next_label != PADDING:
        yield _Token(next_label, weights[-1], None, next_label == ends)


def _merge_aligned_labels(tensors: Mapping[str, Any], begin: int) -> Iterator[_Token]:
    """Yield the tokens of a sequence whose labels belong in the places of the tokens that are read there."""
    ids = tensors["tokens"].tolist(), tensors["labels"].tolist()
    values = (*ids, _loss_weights_by_place(tensors), _mark_document_borders(tensors, begin))
    rows = zip(*values, strict=True)
    for token, label, weight, begins in rows:
        if weight is None:
            yield _Token(token, begins=begins)
        else:
            yield _Token(label, weight, None if token == label else token, begins)


def _line_fragments(tokens: Sequence[_Token], texts: TokenTexts) -> Iterator[Fragment]:
    """Yield the pieces that show the tokens of a line; padding is counted alone."""
    shown_tokens = [token for token in tokens if token.id != PADDING]
    spelled = texts.spell_tokens([token.id for token in shown_tokens])
    read_texts = texts.spell_tokens([token.id if token.instead is None else token.instead for token in shown_tokens])
    weight: str | None = _PLAIN
    for place, (token, text, instead) in enumerate(zip(shown_tokens, spelled, read_texts, strict=True)):
        if token.begins:
            yield Fragment("▌", BORDER, "a document begins")
        if token.weight is not None and token.weight != weight:
            yield Fragment(f"⟨{token.weight}⟩", NOTE)
            weight = token.weight
        about = f"token {token.id}, place {place}"
        if token.instead is not None:
            yield Fragment(instead, HIDDEN, f"token {token.instead} is read here")
        if token.weight is None:
            yield Fragment(text, READ, f"{about}: read, not learned")
        else:
            yield Fragment(text, LEARNED, f"{about}: learned, {token.weight}")
    if padding := len(tokens) - len(shown_tokens):
        yield Fragment(f" ({padding} of padding)", NOTE)


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


def format_step_heading(view: StepView) -> list[str]:
    """Return the lines at the top of the listing of a step's sequences: which step it is, and what it takes."""
    c, (first, end) = view.taken.config, view.taken.samples
    tokens = format_count(view.num_sequences * view.taken.length, "token", ",")
    cut = f", each cut into {view.pieces_per_sample}" if view.pieces_per_sample > 1 else ""
    objective = training_objective_name(c)
    learned = f"{format_count(view.num_labels, 'pair', ',')} of answers" if objective == PREFERENCE else ""
    learned = learned or f"{view.num_labels:,}"
    lines = [
        f"step {view.taken.step} of {c.train.steps} learns from {format_count(view.num_sequences, 'sequence', ',')}"
        f" of {view.taken.length} tokens: samples {first:,} to {end - 1:,} of the run's order{cut}",
        f"{tokens}, {learned} learned; data={c.data.kind}, data.objective={objective}",
    ]
    if view.taken.plan:
        plan = view.taken.plan
        batch = format_count(plan.plan_of_length(view.taken.length).sizes["batch"], "sequence", ",")
        lines.append(f"plan {plan.mesh}: microbatches of {batch}, read by the ranks that each line names")
        if view.work_imbalance:
            ranks = plan.mesh.count_ranks([axis for axis, _ in plan.scheme.context])
            share = f"{view.work_imbalance:.2f} times the mean of attention's scores"
            lines.append(f"work: the busiest of {ranks} ranks that share a sequence has {share}, documents counted")
    return [*lines, *([view.taken.why] if view.taken.why else [])]


def sequence_title(sequence: StepSequence, length: int, most: int | None = None) -> str:
    """Return the line that says which sequence of a step it is, of which documents (at most `most`), and which ranks
    read it."""
    sample = f"sample {sequence.sample:,}" + (f", piece {sequence.piece + 1}" if sequence.piece else "")
    more = len(sequence.documents[most:])
    named = [*sequence.documents[:most], *([f"{more} more"] if more and most else [])]
    parts = [sequence.source, sample, *named]
    if sequence.microbatch is not None:
        reader_names = ", ".join(describe_reader(reader, length) for reader in sequence.readers)
        parts.append(f"microbatch {sequence.microbatch}, {reader_names}")
    return escape_unprintable(f"{sequence.position:>3}  {'; '.join(filter(None, parts))}")


def list_sequences(view: StepView, stream: TextIO, whole: bool = False, only: int | None = None) -> Iterator[str]:
    """Yield the lines of a step's listing, for the screen and colours of `stream`: a screen of lines, or the `whole`.
    `only`: the position of the single sequence to show."""
    width, height = shutil.get_terminal_size()
    console = _open_memory_console(stream, width)
    coloured = console.color_system is not None
    head = [*format_step_heading(view), _LEGEND[coloured]]
    head_height = sum(_count_screen_lines(line, width) for line in head)
    room = max(_LEAST, height - head_height - 2)  # and the last line, and the prompt
    shown = range(view.num_sequences) if only is None else range(only, only + 1)
    if not (whole := whole or only is not None):
        shown = shown[: max(1, room // _LEAST)]
    lines = None if whole else max(1, room // len(shown) - 1)
    texts = TokenTexts(view.corpus)
    yield from (_paint_line(console, line, "bold" if not i else "dim") for i, line in enumerate(head))
    for start in range(shown.start, shown.stop, _AT_ONCE):
        for sequence in view.read_sequences(start, min(start + _AT_ONCE, shown.stop)):
            title = sequence_title(sequence, view.taken.length, None if whole else _DOCUMENTS)
            yield _paint_line(console, title if whole else _cut_line(title, width), "bold")
            fragments_by_name = build_sequence_fragments(sequence, texts, view.corpus.special.begin)
            of_each = lines and max(1, lines // len(fragments_by_name))
            for name, pieces in fragments_by_name.items():
                labelled_pieces = [Fragment(f"{name}: ", NOTE), *pieces] if name else pieces
                yield from _fold_fragments(console, labelled_pieces, width - len(_INDENT), of_each)
    if more := view.num_sequences - shown.stop if not whole else 0:
        yield _paint_line(console, f"{format_count(more, 'more sequence', ',')}: --all, --sample N, --html FILE", "dim")


def _open_memory_console(stream: TextIO, width: int) -> Console:
    """Return a console for a step's listing that writes into memory with the colours of `stream`, if it has any."""
    from rich.console import Console

    return Console(
        file=io.StringIO(), force_terminal=stream.isatty(), width=width, highlight=False, markup=False, emoji=False,
        no_color=None, legacy_windows=False, color_system="auto" if not os.environ.get("NO_COLOR") else None,
    )  # fmt: skip


def _paint_line(console: Console, line: str, style: str) -> str:
    """Return a line of a step's listing in a style, as its console shows it."""
    from rich.text import Text

    return _render_characters(console, Text(line, style))


def _render_characters(console: Console, text: Text) -> str:
    """Return the characters by which a console shows a line of a step's listing."""
    with console.capture() as captured:
        console.print(text, soft_wrap=True, end="")
    return captured.get()


def _count_screen_lines(line: str, width: int) -> int:
    """Return the lines of a screen that a line of the listing of a step's tokens takes."""
    return -(-max(1, len(line)) // width)


def _cut_line(line: str, width: int) -> str:
    """Cut a line of the listing of a step's tokens to a width."""
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _mark_kind_changes(pieces: Sequence[Fragment]) -> Iterator[Fragment]:
    """Yield pieces of a step's listing with marks around the runs of kinds that else differ by their colour."""
    before = ""
    for piece in [*pieces, Fragment("", NOTE)]:
        if piece.kind != before or piece.kind == HIDDEN:
            yield Fragment(_MARKS.get(before, _NONE)[1] + _MARKS.get(piece.kind, _NONE)[0], NOTE)
        yield piece
        before = piece.kind


def _fold_fragments(console: Console, pieces: Sequence[Fragment], width: int, most: int | None) -> Iterator[str]:
    """Yield the lines of `width` characters that show pieces of a sequence, at most `most` of them; the last one then
    says how many tokens it leaves out."""
    pieces = pieces if console.color_system else [*_mark_kind_changes(pieces)]
    lines = [*islice(_wrap_fragments(pieces, lambda _: width), most and most + 1)]
    if most and len(lines) > most:
        total = sum(piece.kind in TOKENS for piece in pieces)
        more = " … {:,} more tokens"
        lines = [*islice(_wrap_fragments(pieces, lambda n: width - (len(more) + 2) * (n == most - 1)), most)]
        lines[-1][0].append(more.format(total - lines[-1][1]), "dim")
    yield from (_render_characters(console, line) for line, _ in lines)


def _wrap_fragments(pieces: Sequence[Fragment], width: Callable[[int], int]) -> Iterator[tuple[Text, int]]:
    """Yield the lines that show pieces of a sequence, each of at most `width(its number)` cells behind the indent, with
    the number of tokens that end in it or before."""
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


_NAMES = {"labels": "learned", "label_weights": "weight"}


def format_token_table(view: StepView, sequence_positions: range) -> Iterator[str]:
    """Yield the lines of a table of a step's tokens at `sequence_positions`, a column per data tensor."""
    texts = TokenTexts(view.corpus)
    yield from format_step_heading(view)
    for position in sequence_positions:
        for sequence in view.read_sequences(position, position + 1):
            yield sequence_title(sequence, view.taken.length)
            yield from _format_table_rows(sequence, texts)


def _format_table_rows(sequence: StepSequence, texts: TokenTexts) -> Iterator[str]:
    """Yield the lines of the table of one sequence: tensors of one length side by side."""
    lengths = dict.fromkeys(map(len, sequence.tensors.values()))
    for length in lengths:
        columns = [["place", *map(str, range(length))]]
        for name, values in sequence.tensors.items():
            if len(values) == length:
                columns.append([_NAMES.get(name, name), *("-" if v == -1 else f"{v:g}" for v in values.tolist())])
                if name in ("tokens", "labels", "source"):
                    spelled = iter(texts.spell_tokens([v for v in values.tolist() if v >= 0]))
                    columns.append(["text", *(f"'{next(spelled)}'" if v >= 0 else "" for v in values.tolist())])
        widths = [max(map(len, column)) for column in columns]
        for row in zip(*columns, strict=True):
            yield "  ".join(cell.ljust(n) if cell.startswith("'") or cell == "text" else cell.rjust(n)
                            for cell, n in zip(row, widths, strict=True)).rstrip()  # fmt: skip


MOST = 300_000  # tokens on a page, unless all are wanted
_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1b1f24; --dim: #6a7581; --line: #e1e5ea;
  --even: #e3eefb; --odd: #fdf0dc; --hidden: #b3261e; --border: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --page: #111418; --card: #1a1f25; --text: #e4e8ed; --dim: #8c98a5;
  --line: #2b323a; --even: #1c3350; --odd: #43331a; --hidden: #ff8a80; --border: #e0b13c; } }
body { margin: 0 auto; max-width: 1100px; padding: 16px; background: var(--page); color: var(--text);
  font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 17px; margin: 0 0 4px; } p { margin: 2px 0; color: var(--dim); overflow-wrap: anywhere; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px;
  margin: 12px 0; }
h2 { font-size: 13px; font-weight: 600; margin: 0 0 6px; overflow-wrap: anywhere; }
pre { margin: 4px 0; font: 13px/1.7 ui-monospace, monospace; white-space: break-spaces; overflow-wrap: anywhere; }
.learned0 { background: var(--even); } .learned1 { background: var(--odd); }
.learned0, .learned1 { border-radius: 3px; }
.read0, .read1, .note { color: var(--dim); } .read1 { text-decoration: underline dotted; }
.hidden { color: var(--hidden); text-decoration: line-through; } .border { color: var(--border); font-weight: 700; }
"""
_HTML_PAGE_LEGEND = (
    Fragment("learned, ", LEARNED), Fragment("token by token; ", LEARNED), Fragment("read, not learned; ", READ),
    Fragment("read in the place of what is learned", "hidden"), Fragment(" ▌", "border"),
    Fragment("a document begins", "note"),
)  # fmt: skip


def render_step_page(view: StepView, whole: bool = False) -> Iterator[str]:
    """Yield the parts of a page that shows the sequences of a step: as many as have MOST tokens, unless the `whole` is
    wanted."""
    title, *more = map(redact_secrets, format_step_heading(view))
    yield html_head(title, f"default-src 'none'; style-src {policy_hash(_STYLE)}", _STYLE)
    yield f"<h1>{escape(title)}</h1>\n" + "".join(f"<p>{escape(line)}</p>\n" for line in more)
    yield f"<pre>{''.join(_render_spans(_HTML_PAGE_LEGEND))}</pre>\n"
    shown = view.num_sequences if whole else min(view.num_sequences, max(1, MOST // view.taken.length))
    texts, begin = TokenTexts(view.corpus), view.corpus.special.begin
    for start in range(0, shown, 64):
        for sequence in view.read_sequences(start, min(start + 64, shown)):
            yield f"<article><h2>{escape(redact_secrets(sequence_title(sequence, view.taken.length)))}</h2>\n"
            for name, pieces in build_sequence_fragments(sequence, texts, begin).items():
                label = f'<span class="note">{escape(name)}: </span>' if name else ""
                yield f"<pre>{label}{''.join(_render_spans(pieces))}</pre>\n"
            yield "</article>\n"
    if shown < view.num_sequences:
        others = format_count(view.num_sequences - shown, "more sequence", ",")
        yield f"<p>{others} of this step: --all puts them here.</p>\n"
    yield "</html>\n"


def _render_spans(pieces: list[Fragment] | tuple[Fragment, ...]) -> Iterator[str]:
    """Yield the elements that show pieces: text alone, in which no markup of a corpus is any."""
    tokens = 0
    for piece in pieces:
        name = f"{piece.kind}{tokens % 2}" if piece.kind in TOKENS else piece.kind
        tokens += piece.kind in TOKENS
        title = f' title="{escape(piece.about)}"' if piece.about else ""
        yield f'<span class="{name}"{title}>{escape(piece.text)}</span>'
