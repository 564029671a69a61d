"""Storages of small checkpoints, without a real fsync."""

import itertools
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from platform.boundary import local_files as storage_module
from platform.boundary.storage import Storage, open_storage
from tests.doubles.faulty_os import FaultyOs
from tests.harness.small_storage import job


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch):
    """No real fsync; and small tensors are cut as large ones are."""
    monkeypatch.setattr(storage_module, "os", FaultyOs())
    monkeypatch.setattr("platform.checkpoint.blocks.LARGEST_ROW", 16)


@pytest.fixture
def storage(tmp_path):
    """With a checkpoint of step 1."""
    storage = open_storage(str(tmp_path / "checkpoints"))
    job(1).save(storage, 1)
    return storage


@pytest.fixture
def copies(tmp_path) -> Callable[..., Storage]:
    """`copies(1, 2)`: a fresh storage with checkpoints of steps 1 and 2."""
    folders: dict[tuple[int, ...], Path] = {}
    number = itertools.count()

    def copy(*steps: int) -> Storage:
        if steps not in folders:
            folders[steps] = tmp_path / f"steps {steps}"
            for step in steps:
                job(step).save(open_storage(str(folders[steps])), step)
        return open_storage(str(copytree(folders[steps], tmp_path / str(next(number)))))

    return copy
