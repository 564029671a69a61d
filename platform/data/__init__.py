"""Data pipeline: text -> tokens -> one global order of samples, independent of world size. Imports neither torch nor
Ray."""

from platform.data.corpus import Corpus, check, of, prepare
from platform.data.permutation import order
from platform.data.sources import stdlib_bytes
from platform.data.tokenizer import END_OF_TEXT

__all__ = ["END_OF_TEXT", "Corpus", "check", "of", "order", "prepare", "stdlib_bytes"]
