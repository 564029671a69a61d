"""Parser of tokenizers: makes tokenizer.json of the other forms in which they are published, and encodes texts by it.
Only here is a foreign tokenizer run."""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING, Any

from platform.boundary.parser_process import Read
from platform.data.tokenizers.tokenizer_files import made_of, parse_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_opened: list[Tokenizer] = []  # the last one


def answer_tokenizer(request: dict[str, Any], body: bytes, read: Read) -> bytes:
    """Answer the parent's request to this child process, which alone runs foreign tokenizers; `do` names the action."""
    return _DO[request["do"]](request, body)


def _make(request: dict[str, Any], body: bytes) -> bytes:
    """Return a tokenizer.json made of a tokenizer's other files, listed in the request and end to end in the body."""
    found, place = {}, 0
    for name, size in request["files"]:
        found[name] = body[place : place + size]
        place += size
    return made_of(found, request["words"])


def _add(request: dict[str, Any], body: bytes) -> bytes:
    """Add the request's special tokens to the tokenizer.json in the body, and return it."""
    tokenizer = parse_tokenizer(body)
    tokenizer.add_special_tokens(request["tokens"])
    return tokenizer.to_str().encode()


def _open(request: dict[str, Any], body: bytes) -> bytes:
    """Open the tokenizer.json in the body; return its vocabulary and its added tokens (id, text, special) as JSON."""
    _opened[:] = [parse_tokenizer(body)]
    added = [(i, token.content, token.special) for i, token in _opened[0].get_added_tokens_decoder().items()]
    return json.dumps({"vocab": _opened[0].get_vocab(with_added_tokens=True), "added": added}).encode()


def _encode(request: dict[str, Any], body: bytes) -> bytes:
    """Tokenize the texts in the body (JSON) by the opened tokenizer. Return 4-byte integers: the number of tokens in
    each text, the ids of all and, with `ends`, the number of characters of its text up to the end of each token."""
    texts = json.loads(body)
    run = _opened[0].encode_batch if request["ends"] else _opened[0].encode_batch_fast
    found = run(texts, add_special_tokens=False)
    out = array("I", [len(e) for e in found])
    for encoding in found:
        out.extend(encoding.ids)
    for encoding in found if request["ends"] else ():
        out.extend([end for _, end in encoding.offsets])
    return out.tobytes()


def _decode(request: dict[str, Any], body: bytes) -> bytes:
    """Return the text, in UTF-8, that the opened tokenizer decodes from the token ids in the body (JSON)."""
    return _opened[0].decode(json.loads(body), skip_special_tokens=request["skip"]).encode(errors="replace")


_DO = {"make": _make, "add": _add, "open": _open, "encode": _encode, "decode": _decode}
