"""Page of a step's sequences: one file that loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from platform.boundary.redaction import redact
from platform.data.show.html_head import allowed, html_head
from platform.data.show.pieces_of_text import LEARNED, READ, TOKENS, Fragment, lines_of
from platform.data.show.step_view import StepView
from platform.data.show.terminal_list import about, heading
from platform.data.show.token_texts import TokenTexts
from platform.plan.language.numbers import count_of

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
_LEGEND = (
    Fragment("learned, ", LEARNED), Fragment("token by token; ", LEARNED), Fragment("read, not learned; ", READ),
    Fragment("read in the place of what is learned", "hidden"), Fragment(" ▌", "border"),
    Fragment("a document begins", "note"),
)  # fmt: skip


def page_of(view: StepView, whole: bool = False) -> Iterator[str]:
    """Yield the parts of a page that shows the sequences of a step: as many as have MOST tokens, unless the `whole` is
    wanted."""
    title, *more = map(redact, heading(view))
    yield html_head(title, f"default-src 'none'; style-src {allowed(_STYLE)}", _STYLE)
    yield f"<h1>{escape(title)}</h1>\n" + "".join(f"<p>{escape(line)}</p>\n" for line in more)
    yield f"<pre>{''.join(_spans(_LEGEND))}</pre>\n"
    shown = view.count if whole else min(view.count, max(1, MOST // view.taken.length))
    texts, begin = TokenTexts(view.corpus), view.corpus.special.begin
    for start in range(0, shown, 64):
        for sequence in view.sequences(start, min(start + 64, shown)):
            yield f"<article><h2>{escape(redact(about(sequence, view.taken.length)))}</h2>\n"
            for name, pieces in lines_of(sequence, texts, begin).items():
                label = f'<span class="note">{escape(name)}: </span>' if name else ""
                yield f"<pre>{label}{''.join(_spans(pieces))}</pre>\n"
            yield "</article>\n"
    if shown < view.count:
        yield f"<p>{count_of(view.count - shown, 'more sequence', ',')} of this step: --all puts them here.</p>\n"
    yield "</html>\n"


def _spans(pieces: list[Fragment] | tuple[Fragment, ...]) -> Iterator[str]:
    """Yield the elements that show pieces: text alone, in which no markup of a corpus is any."""
    tokens = 0
    for piece in pieces:
        name = f"{piece.kind}{tokens % 2}" if piece.kind in TOKENS else piece.kind
        tokens += piece.kind in TOKENS
        title = f' title="{escape(piece.about)}"' if piece.about else ""
        yield f'<span class="{name}"{title}>{escape(piece.text)}</span>'
