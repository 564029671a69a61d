"""Sources of data: files of text or of records, found by `data.path` or by a user's function, and read.

A file of text is one document; .jsonl, .parquet and .arrow hold a record per line or row. Any file of text may be
compressed with gzip or zstd. Text is UTF-8 without NUL bytes."""

from platform.data.sources import conversations as conversations
from platform.data.sources import pairs as pairs
from platform.data.sources.iterables import register_documents as register_documents
from platform.data.sources.texts import register_source as register_source
