"""Text -> tokens -> one global, world-size-independent order of samples. Imports neither torch nor Ray."""

from platform.data.corpus import Corpus, check, of, prepare
from platform.data.permutation import order
from platform.data.sources import stdlib_bytes
from platform.data.tokenizer import END_OF_TEXT

__all__ = ["END_OF_TEXT", "Corpus", "check", "of", "order", "prepare", "stdlib_bytes"]
