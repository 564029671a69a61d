"""Keys of group data: which data a run trains on, and what the model predicts in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from platform.config.key import key, own_settings


@dataclass
class Data:
    """Training data, and what the model predicts in it."""

    kind: str = key(
        "stdlib",
        "source of the data",
        ("stdlib", "text", "instructions", "pairs", "tokens", "synthetic", "mixture"),
        open=True,
    )
    path: str = key("", "files of data: a file, a folder, a glob, or a URL of any of these")
    sources: dict[str, Any] = key({}, "data=mixture: source -> its keys of this group, and weight or epochs")
    field: str = key("text", ".jsonl, .parquet, .arrow: name of the field that holds the text, messages or tokens")
    target_path: str = key("", "data=pairs: file whose lines translate the lines of data.path")
    target_field: str = key("target", "name of the field that translates (data=pairs) or answers data.field")
    input_field: str = key(
        "", "data=instructions: name of the field that goes on a prompt in data.field, behind a line end; none = unread"
    )
    objective: str = key(
        "",
        'what is predicted; "" = the default for model.kind and the data',
        ("", "causal", "masked", "span_denoising", "pairs"),
        open=True,
    )
    document_mask: bool = key(
        False, "decoder: attention and positions restart at documents, whose beginnings are not predicted"
    )
    packing: str = key(
        "cut", "rows: cut from the tokens end to end, or best_fit: of whole documents, padded", ("cut", "best_fit")
    )
    overlong: str = key(
        "split",
        "data.packing=best_fit: a document longer than a row is split over rows, cut at the end of one, or dropped",
        ("split", "cut", "drop"),
    )
    tokenizer: str = key("train", "tokenizer.json, a folder, a tiktoken or sentencepiece file; train = its own BPE")
    tokenizer_words: str = key("", "tiktoken: gpt2, cl100k_base, qwen, o200k_base or a regular expression of words")
    foreign_tokenizer: bool = key(
        False, "the tokenizer may be another than that of the weights of train.init, which then read other tokens"
    )
    special_tokens: list[str] = key([], "special tokens that the tokenizer gets beside its own")
    end_token: str = key("", 'special token that ends documents; "" = as the tokenizer says')
    begin_token: str = key("", 'special token that begins documents; "" = as the tokenizer says')
    chat_template: str = key("", 'how conversations are written: chatml or a file; "" = as the tokenizer says')
    dtype: str = key(
        "uint16", "data=tokens: type of a .bin without an index", ("uint8", "uint16", "uint32", "int32", "int64")
    )
    separator: int = key(
        -1, "data=tokens: the token with which a document begins; -1 = none, or an index says", ">= -1", most=2**24
    )
    streaming: bool = key(False, "tokenise a source while it is trained on, block by block, and keep the newest blocks")
    block: int = key(
        16_000_000, "data.streaming: characters of a block, of which samples are shuffled", ">= 100", most=10**9
    )
    validation_path: str = key("", 'files that are held out for validation; "" = a part of data.path')
    validation: float = key(0.05, "fraction of the documents held out for validation; 0 = none", ">= 0 and < 1")
    cache: str = key("", 'folder for tokenised corpora; "" = ~/.cache/elastic-platform')
    settings: dict[str, Any] = own_settings("source")
    objective_settings: dict[str, Any] = own_settings("objective")
