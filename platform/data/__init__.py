"""Data pipeline: text -> tokens -> one global order of samples, independent of world size. Imports neither torch nor
Ray; which rank reads which part of a sample is shown here, with the sequences of a step, but not decided.

Its files in reading order: corpus, mixture, objectives, streams, packing, teacher_classes, cache_entries, cache,
source_kind, text_sources, token_files, data_files, tokenizer, tokenizer_files, special_tokens, chat_templates,
conversations, parsers, data_checks, step_view, step_listing, html_head.
"""
