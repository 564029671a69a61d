"""Files of tables, tokenizers and templates, damaged at random: each is read, or refused in one line. That a child dies
of one is a class of its own; that this process would, ends the fuzzer."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import chat_templates, text_sources
from platform.data.chat_templates import CHATML, ChatTemplate
from platform.data.tokenizer import load_named_vocabulary
from tests.fuzz import mutations

FORMATS = ("parquet", "stream", "file", "packed stream", "tokenizer.json", "sentencepiece", "ranks", "template")
ENDINGS = ("read", "refused", "died")
CLASSES = [f"{form}: {end}" for form in FORMATS for end in ENDINGS]
TEXT = "A zebra, 12 of them: \u00e9\u4e2d\U0001f600 </s>\n"
TALK = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "4 <b>"}]
PIECES = (
    "{{ messages }}", "{{ messages[0].content }}", "{% for m in messages %}", "{% endfor %}", "{% if loop %}",
    "{% endif %}",
    "{{ m | tojson(indent=9) }}", "{{ 'x' * 99 ** 9 }}", "{% set n = namespace(x='ab') %}", "{% set n.x = n.x * 999 %}",
    "{{ n.x }}", "{% macro f(a) %}", "{% endmacro %}", "{{ f(f) }}", "{{ range(9999) | list }}", "{% generation %}",
    "{% endgeneration %}", "{{ raise_exception(m) }}", "{{ m.__class__ }}", "{{ 1 / loop.index0 }}", "{%", "}}", "((((",
    "{% for i in range(99999) %}", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ ('%%%dd' % 10 ** 9) | format(1) }}", "{{ 'inf' | float }}", "{% break %}",
)  # fmt: skip


@contextmanager
def opened() -> Iterator[Callable[[int], str]]:
    """Yield the function that draws and checks a case. What a case may take is small, so that many are tried."""
    kept = chat_templates._CHAT_SECONDS, chat_templates._SECONDS, chat_templates._MEMORY
    chat_templates._CHAT_SECONDS, chat_templates._SECONDS, chat_templates._MEMORY = 1, 2, 64 << 20
    try:
        with TemporaryDirectory() as folder:
            good = originals(Path(folder))
            yield lambda seed: attempt(Path(folder), good, Random(seed))
    finally:
        chat_templates._CHAT_SECONDS, chat_templates._SECONDS, chat_templates._MEMORY = kept


def attempt(root: Path, good: dict[str, bytes], draw: Random) -> str:
    """Draw a case and check it."""
    form = draw.choice(FORMATS)
    raw = template(draw) if form == "template" else damaged(draw, good[form])
    try:
        tried(root, form, raw)
    except ConfigError as error:
        lines = error.violations
        assert len(lines) == 1 and lines[0].isprintable() and len(lines[0]) < 2000, lines
        return f"{form}: {'died' if any(word in lines[0] for word in DEATHS) else 'refused'}"
    return f"{form}: read"


DEATHS = ("its parser died", "takes more than")


def tried(root: Path, form: str, raw: bytes) -> None:
    """Read bytes as a file of a format. Raises ConfigError."""
    if form == "template":
        list(ChatTemplate(raw.decode(), {"bos": "<s>"}, ["<s>"]).render_parts(TALK))
    elif form in TABLES:
        path = root / f"a{TABLES[form]}"
        path.write_bytes(raw)
        for _ in text_sources.read_documents([path], Data(kind="text", path=str(path))):
            pass
    else:
        path = root / {"sentencepiece": "a.model", "ranks": "a.tiktoken"}.get(form, "tokenizer.json")
        path.write_bytes(raw)
        vocabulary = load_named_vocabulary(Data(tokenizer=str(path), tokenizer_words="gpt2"))
        assert vocabulary
        vocabulary.decode(vocabulary.encode(TEXT))


def damaged(draw: Random, raw: bytes) -> bytes:
    """Return a file with bits, integers or stretches of it replaced, where its bytes mostly say its structure."""
    out = bytearray(raw)
    for _ in range(draw.choice([1, 1, 2, 3, 8])):
        at = draw.randrange(len(out))
        kind = draw.randrange(6)
        if kind == 0:
            out[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            number = draw.choice([0, 1, -1, 1 << 20, 0x7FFF0000, -(1 << 31), 255])
            at = min(at // 4 * 4, len(out) - 4)
            out[at : at + 4] = struct.pack("<i", number)
        elif kind == 2:
            at = min(at // 8 * 8, len(out) - 8)
            out[at : at + 8] = struct.pack("<q", draw.choice([0, -1, 1 << 33, 1 << 62, -(1 << 63)]))
        elif kind == 3:
            out[at : at + draw.randrange(16)] = draw.randbytes(draw.randrange(16))
        elif kind == 4:
            out[at : at + 1] = draw.choice([b"a", b"0", b"9", b'"', b"{", b"\xff"])
        else:
            out[at:at] = out[at : at + draw.randrange(64)]
        out = out or bytearray(b"\0" * 8)
        out += b"\0" * max(0, 8 - len(out))
    return mutations.cut(draw, bytes(out)) if draw.random() < 0.05 else bytes(out)


def template(draw: Random) -> bytes:
    """Return a template of pieces in any order; or a real one, with some among its letters."""
    drawn = [draw.choice(PIECES) for _ in range(draw.randint(1, 9))]
    if draw.random() < 0.5:
        return "".join(drawn).encode()
    at = draw.randrange(len(CHATML))
    return (CHATML[:at] + draw.choice(drawn) + CHATML[at:]).encode()


TABLES = {"parquet": ".parquet", "stream": ".arrow", "file": ".arrow", "packed stream": ".arrow"}


def originals(root: Path) -> dict[str, bytes]:
    """Return a real file of each format."""
    import pyarrow
    from pyarrow import ipc, parquet

    rows = [f"row {i} " * (i % 7) for i in range(40)]
    column = pyarrow.array([rows[i % 3] for i in range(40)]).dictionary_encode()
    table = pyarrow.table({"text": rows, "n": list(range(40)), "d": column, "more": [[{"role": row}] for row in rows]})
    parquet.write_table(table, root / "good.parquet", row_group_size=20)
    packed = ipc.IpcWriteOptions(compression="zstd")
    for name, opener, options in (
        ("stream", ipc.new_stream, None), ("file", ipc.new_file, None), ("packed stream", ipc.new_stream, packed)
    ):  # fmt: skip
        with opener(root / name, table.schema, options=options) as to:
            to.write_table(table, max_chunksize=20)
    streams = {name: (root / name).read_bytes() for name in ("stream", "file", "packed stream")}
    return {
        **streams,
        "parquet": (root / "good.parquet").read_bytes(),
        "tokenizer.json": tokenizer_json(),
        "sentencepiece": sentencepiece(),
        "ranks": ranks(),
    }


def tokenizer_json() -> bytes:
    """Return a small tokenizer with a step of every kind that has caused harm."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -2.0 - i) for i, c in enumerate("azebrt hm12 ,:"[:10]))]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    steps = [normalizers.NFKC(), normalizers.Replace("a", "aa"), normalizers.Prepend("_")]
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Sequence(steps), pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return json.dumps(json.loads(tokenizer.to_str())).encode()


def sentencepiece() -> bytes:
    """Return a small model of sentencepiece, whose map of characters is not empty."""

    def field(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2, len(value) & 0x7F | 0x80, len(value) >> 7]) + value

    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((c, 1) for c in "\u2581azebr"), ("ze", 1), ("\u2581a", 1)]
    rows = [
        field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", -i) + bytes([0x18, kind]))
        for i, (text, kind) in enumerate(pieces)
    ]
    return b"".join(rows) + field(3, field(2, struct.pack("<I", 1024) + b"\0" * 1025))


def ranks() -> bytes:
    """Return a file of ranks of the bytes and some pairs."""
    tokens = [*(bytes([b]) for b in range(256)), b"ze", b"br", b"zebr", b" a"]
    return b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens))
