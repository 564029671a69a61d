"""Tokenizers' files: SentencePiece models, tiktoken ranks and tokenizer.json, read within bounds, and their templates
of a conversation."""
