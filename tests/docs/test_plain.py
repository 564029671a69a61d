"""Plain sentences in the pages: none has a relative clause as its subject."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import PAGES, prose
from tests.house.language import RELATIVE, sentences


def riddles(text: str) -> list[str]:
    """Return the sentences of a page's paragraphs and lists that open with a relative clause as their subject."""
    lines = [line for line in text.splitlines() if not line.startswith(("#", "|", "**"))]
    parts = [s for line in lines for s in sentences(re.sub(r"^(?:-|\d+\.) (?:\*\*)?", "", line))]
    return [s for s in parts if re.match(RELATIVE, s) and not re.match(r"That is\b|[^.]*\?", s)]


def test_a_sentence_names_its_subject():
    sentences = [f"{page.name}: {s}" for page in PAGES for s in riddles(prose(page))]
    assert sentences == []


@pytest.mark.parametrize(
    "text", ["Kept. What is left is deleted.", "- Those that remain vote.", "1. Who is there is asked."]
)
def test_a_riddle_is_seen(text):
    assert len(riddles(text)) == 1


@pytest.mark.parametrize("text", ["## What is left", "What is left? Nothing.", "It keeps what is left."])
def test_plain_words_are_none(text):
    assert riddles(text) == []
