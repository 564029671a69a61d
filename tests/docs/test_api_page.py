"""docs/api.md is what docs/api.py renders: every exported name, with its docstring."""

from __future__ import annotations

import re

from docs import api as page
from platform import api
from tests.docs.pages import ROOT

TEXT = (ROOT / "docs" / "api.md").read_text()


def test_the_page_is_what_is_exported():
    assert page.render_page() == TEXT, "`python -m docs.api > docs/api.md` writes it"


def test_every_exported_name_has_its_entry():
    assert {*re.findall(r"^### (\w+)$", TEXT, re.M)} == {*api.__all__} - page.UNSAID
    assert all(getattr(api, name) for name in page.UNSAID)


def test_a_signature_is_that_of_the_source():
    """Negative control too: another docstring or signature is another page."""
    assert "\nplan(config: Config, workers: int | None=None) -> Plan\n" in TEXT
    assert "\nResult.loss: float | None\n" in TEXT and "\nPlan.buckets" not in TEXT

    def plan(config: int, *, more: str = "") -> str:
        """Make another."""

    signature = page.render_signature(page.read_declaration(plan), "plan")  # type: ignore[arg-type]
    assert signature == "plan(config: int, *, more: str='') -> str"
    assert page.render_text("One\nline.\n\n    a = 1\n\n    b = 2\n") == "One line.\n\n```python\na = 1\n\nb = 2\n```"
