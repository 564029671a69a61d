"""A pool of gloo processes."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def pool():
    """Eight gloo processes."""
    from tests.pool import Pool

    pool = Pool()
    yield pool
    pool.close()
