import pytest

from platform.config.fields import Data
from platform.data.source_kind import KINDS


@pytest.fixture
def writing(monkeypatch):
    """Lets every kind of source write its entries by another function."""

    def by(write):
        for kind in {type(kind) for kind in KINDS.values()}:
            monkeypatch.setattr(kind, "write_cache_entry", write and (lambda _, *args: write(*args)))

    return by


@pytest.fixture
def words():
    """Some 5 kB of text that differs with the seed, compresses as text does, and spells a special token."""

    def make(seed: int, lines: int = 100) -> str:
        return f"<|endoftext|> {seed}\n" + "".join(
            f"line {i} of text {seed}: {i * seed} sheep, {i + seed} wolves\n" for i in range(lines)
        )

    return make


@pytest.fixture
def folder(tmp_path, words):
    """Twenty documents."""
    root = tmp_path / "texts"
    root.mkdir()
    for i in range(20):
        (root / f"{i:02}.txt").write_text(words(i))
    return root


@pytest.fixture
def data(tmp_path, folder):
    """The configuration of data=text over `folder`, with a cache of its own."""
    return Data(kind="text", path=str(folder), validation=0.1, cache=str(tmp_path / "cache"))
