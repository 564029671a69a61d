"""Says how many of how many cases ran."""

from __future__ import annotations

import pytest

_counts: dict[str, tuple[int, int, str]] = {}
_COVER = "pairwise cover; `make test-all` runs every one"


@pytest.fixture
def record_count():
    """`record_count(what, ran, of, how)`: printed once at the end of the session."""
    return lambda what, ran, of, how=_COVER: _counts.update({what: (ran, of, how)})


def pytest_terminal_summary(terminalreporter):
    for what, (ran, of, how) in _counts.items():
        terminalreporter.write_line(f"{what}: {ran} of {of} cases ({how})")


@pytest.fixture(scope="session")
def pool():
    """Eight gloo processes."""
    from tests.pool import Pool

    pool = Pool()
    yield pool
    pool.close()
