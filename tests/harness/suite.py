"""A product of cases as one test: `make test` runs a cover of it, `make test-all` the rest too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.harness.pairwise import Case, cover

full = True  # False in `make test`: tests/conftest.py


def suite(what: str, cases: Sequence[Case], chosen: Sequence[Case] | None = None) -> Callable[[Any], Any]:
    """Return a decorator that runs a test with each `case`: all but those `chosen`, a pairwise cover unless given, are
    marked `full`; where these do not run at all, they are not even collected. How many of how many ran is printed at
    the end, after `what`."""
    chosen = cover(cases) if chosen is None else chosen
    few = [pytest.param(case, id=title(case)) for case in chosen]
    left = [case for case in cases if case not in chosen] if full else []
    rest = [pytest.param(case, id=title(case), marks=pytest.mark.full) for case in left]

    def decorate(test: Any) -> Any:
        return pytest.mark.counted(what, len(few + rest), len(cases))(pytest.mark.parametrize("case", few + rest)(test))

    return decorate


def title(case: Case) -> str:
    """Return the values of a case, in a line."""
    return " ".join(str(value) for value in case.values())
