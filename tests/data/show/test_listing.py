"""A listing on a terminal, in a pipe and as a page: what it shows, how much of it, and that nothing of a text acts."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from platform.config.fields import Config
from platform.data.corpus import open_run_corpus
from platform.data.step_listing import (
    BORDER,
    HIDDEN,
    LEARNED,
    READ,
    TOKENS,
    build_sequence_fragments,
    format_token_table,
    list_sequences,
    render_step_page,
)
from platform.data.step_view import StepView, TokenTexts
from platform.predict.make_plan import make_plan
from tests.data.show.test_step_view import configured, folder, shown  # noqa: F401

HOSTILE = '<script>alert(1)</script> \x1b[31m \x07 \u202e "&quot; <img src=x onerror=alert(2)> 😀 é\n'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def view_of(folder: Path, kind: str, *scheme, **more) -> StepView:  # noqa: F811
    c = configured(folder, kind, *scheme, **more)
    return shown(c, make_plan(c), 1)


@pytest.fixture
def screen(monkeypatch):
    """A screen of 60 x 20 characters that knows colours."""
    for name, value in {"COLUMNS": "60", "LINES": "20", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", line)


def test_a_listing_fits_a_screen_unless_all_is_wanted(folder, screen):  # noqa: F811
    view = view_of(folder, "text", data=2)
    lines = [*list_sequences(view, io.StringIO())]
    assert sum(-(-max(1, len(line)) // 60) for line in lines) <= 19 and "more sequences: --all" in lines[-1]
    every = [*list_sequences(view, io.StringIO(), whole=True)]
    titles = [line for line in every if re.match(r" *\d+  sample", line)]
    assert len(titles) == view.num_sequences and all("microbatch" in line for line in titles)
    one = [*list_sequences(view, io.StringIO(), only=5)]
    assert [line for line in one if line in titles] == [titles[5]]


def test_colours_are_for_terminals_that_want_them(folder, screen, monkeypatch):  # noqa: F811
    view = view_of(folder, "packed")
    assert "\x1b" not in "".join(list_sequences(view, io.StringIO()))
    coloured = [*list_sequences(view, Terminal(), whole=True)]
    assert "\x1b[36m" in "".join(coloured) and "‹" not in plain("".join(coloured))
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert [*list_sequences(view, Terminal(), whole=True)] == [
                *list_sequences(view, io.StringIO(), whole=True)
            ], name


def test_every_plan_gives_the_same_listing(folder, screen):  # noqa: F811
    plans = [((), {}), (("1d", {"t": 2}), {"data": 2}), ((), {"context": 2}), ((), {"pipeline": "gpipe", "stages": 2})]
    lists = []
    for scheme, more in plans:
        every = list_sequences(view_of(folder, "packed", *scheme, **more), io.StringIO(), whole=True)
        lists.append([re.sub("; microbatch.*", "", line) for line in every if not line.startswith(("plan", "work"))])
    assert all(listing == lists[0] for listing in lists[1:]) and len(lists[0]) >= 3 + 2 * 8


@pytest.mark.parametrize("kind", ["text", "packed", "talks", "masked", "spans", "pairs"])
def test_pieces_are_the_tokens_and_what_of_them_is_learned(folder, kind):  # noqa: F811
    """By hand: the text of all pieces, the learned ones among them, and those that are read in their place."""
    view = view_of(folder, kind)
    corpus, texts, begin = view.corpus, TokenTexts(view.corpus), view.corpus.special.begin
    learned = 0
    for sequence in view.read_sequences(0, view.num_sequences):
        tensors = {name: row.tolist() for name, row in sequence.tensors.items()}
        lines = build_sequence_fragments(sequence, texts, begin)
        pieces = lines[""]
        wanted = [label for label in tensors["labels"] if label >= 0]
        learned += len(wanted)
        assert [p.text for p in pieces if p.kind == LEARNED] == texts.spell_tokens(wanted)
        hidden = [t for t, label in zip(tensors["tokens"], tensors["labels"], strict=True) if label >= 0 and t != label]
        assert [p.text for p in pieces if p.kind == HIDDEN] == (texts.spell_tokens(hidden) if kind == "masked" else [])
        ids = [int(re.match(r"token (\d+)", p.about)[1]) for p in pieces if p.kind in TOKENS]
        if kind == "masked":
            assert ids == [
                t if label < 0 else label for t, label in zip(tensors["tokens"], tensors["labels"], strict=True)
            ]
        elif kind in ("text", "talks", "spans", "pairs"):
            read = [t for t in tensors["tokens"] if t >= 0]
            assert ids[: len(read)] == read and len(ids) <= len(read) + 1
        if "source" in tensors:
            assert [p.text for p in lines["source"] if p.kind == READ] == texts.spell_tokens(
                [t for t in tensors["source"] if t >= 0]
            )
            assert not any(p.kind == BORDER for p in pieces)
        if kind == "packed":
            starts = [i for i, place in enumerate(tensors["positions"]) if place == 0 and tensors["tokens"][i] >= 0]
            assert {i for i in starts if i} <= {p_at for p_at in borders(pieces)}
    assert learned == view.num_labels == corpus.predicted("train", *view.taken.samples)


def borders(pieces) -> list[int]:
    """The tokens before each border."""
    places, count = [], 0
    for piece in pieces:
        places += [count] if piece.kind == BORDER else []
        count += piece.kind in TOKENS
    return places


def test_a_character_in_several_tokens_is_shown_once(tmp_path, folder):  # noqa: F811
    c = hostile(tmp_path, folder)
    corpus = open_run_corpus(c)
    for text in ("a 😀 é b", "漢字", "plain"):
        spelt = TokenTexts(corpus).spell_tokens(corpus.encode(text))
        assert "".join(spelt) == text and len(spelt) == len(corpus.encode(text))


def hostile(tmp_path: Path, folder: Path) -> Config:  # noqa: F811
    (tmp_path / "<b>bad &amp.txt").write_text(HOSTILE * 60)
    c = configured(folder, "text", data=2)
    c.data = replace(c.data, path=str(tmp_path / "<b>bad &amp.txt"))
    return c


def test_nothing_of_a_text_acts(tmp_path, folder, screen):  # noqa: F811
    c = hostile(tmp_path, folder)
    view = shown(c, make_plan(c), 1)
    assert all(line.isprintable() for line in list_sequences(view, io.StringIO(), whole=True))
    assert all(plain(line).isprintable() for line in list_sequences(view, Terminal(), whole=True))
    assert all(line.isprintable() for line in format_token_table(view, range(2)))
    page = "".join(render_step_page(view))
    assert "default-src 'none'" in page and "bad" in page and "alert" in page
    tags = set(re.findall(r"<(/?\w+)", page))
    assert tags <= {"html", "/html", "meta", "title", "/title", "style", "/style", "h1", "/h1", "h2", "/h2", "p", "/p",
                    "pre", "/pre", "span", "/span", "article", "/article"}  # fmt: skip
    assert not re.search(r"https?://|\son\w+=|url\(|@import", re.sub(r"<span.*?</span>|<h2.*?</h2>", "", page))
    assert not re.search(r"<span[^>]*\son\w+=", page) and "\x1b" not in page and "\u202e" not in page


def test_a_page_has_all_tokens_of_its_sequences(folder):  # noqa: F811
    view = view_of(folder, "talks")
    page = "".join(render_step_page(view))
    count = len(re.findall(r'<span class="learned\d" title', page))
    assert count == view.num_labels and page.count("<article>") == view.num_sequences


def test_a_table_has_what_a_rank_gets(folder):  # noqa: F811
    view = view_of(folder, "masked")
    rows = [line.split() for line in format_token_table(view, range(1))][-16:]
    (sequence,) = view.read_sequences(0, 1)
    assert [int(row[1]) for row in rows] == sequence.tensors["tokens"].tolist()
    assert [row[-2 if row[-1] == "'" else -1] == "-" for row in rows] != [True] * 16
