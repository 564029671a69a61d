"""The vocabulary of a corpus: its tokenizer with its special tokens, trained on the corpus or given by its files.

`train_tokenizer` trains byte-level BPE, so that every text round-trips and none is unknown. `encode_documents` encodes
by any tokenizer, in time linear in the text, on all cores, with word of how far it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from hashlib import sha256
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary import documents
from platform.boundary.refusals import ConfigError, refuse_failures
from platform.boundary.schema import Malformed
from platform.boundary.terminal import show_phase
from platform.config.fields import Data
from platform.data import chat_templates, tokenizer_files
from platform.data.chat_templates import CHATML, CHATML_TOKENS, ChatTemplate, ConfinedTokenizer, Parts
from platform.data.special_tokens import SpecialIds, collect_named_tokens, complete_named_tokens, find_special_ids
from platform.data.tokenizer_files import CONFIG, JSON, KEY, NAMES, TokenizerFiles, add_config_keys, chat_template

if TYPE_CHECKING:
    from tokenizers import Tokenizer


TRAIN = "train"  # data.tokenizer: a tokenizer of the corpus's own
END = "<|endoftext|>"
OWN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
_LARGEST_TEMPLATE = 1 << 20  # bytes


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer of a corpus: texts to ids and back. `files`: its files, by name; `named`: its special tokens by role,
    such as eos; `special`: their ids; `pretrained`: it was not trained on the corpus, so that a document is only
    encoded right as a whole."""

    tokenizer: Tokenizer | ConfinedTokenizer
    files: TokenizerFiles
    named: Mapping[str, str]
    special: SpecialIds
    pretrained: bool

    @cached_property
    def size(self) -> int:
        """Return the number of this vocabulary's token ids: one more than the highest."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_tokens(self) -> list[str]:
        """Return the spellings of all special tokens of this vocabulary, in the order of their ids."""
        added: Mapping[int, Any] = self.tokenizer.get_added_tokens_decoder()
        return [token.content for _, token in sorted(added.items()) if token.special]

    @cached_property
    def digest(self) -> str:
        """Return a hash of the tokenizer's files: equal hashes mean equal ids, special tokens and chat templates."""
        named = sorted((name, sha256(raw).hexdigest()) for name, raw in self.files.items())
        return sha256(json.dumps(named).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into the folder of a data cache entry, for `open_vocabulary`."""
        for name, raw in self.files.items():
            if self.pretrained or name != CONFIG:
                (folder / name).write_bytes(raw)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, in which the spelling of a special token is text."""
        return self.encode_texts([text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each of several texts, encoded on all cores; special tokens' spellings are text."""
        if not self._cut_pattern:
            return [e.ids for e in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        parts = [self._cut_pattern.split(text) for text in texts]
        flat_parts = [part for some in parts for part in some]
        encodings = self.tokenizer.encode_batch_fast(flat_parts, add_special_tokens=False)
        ids = iter(e.ids for e in encodings)
        return [[i for _ in some for i in next(ids)] for some in parts]

    def encode_parts(self, documents: Sequence[Parts]) -> list[tuple[list[int], list[bool]]]:
        """Tokenize conversations given in parts: return, for each, its token ids, and for each id whether it belongs to
        an answer. Parts between special tokens are encoded together; a token with a character of an answer belongs
        to it, as in `transformers`."""
        runs = [[list(run) for _, run in groupby(parts, itemgetter(1))] for parts in documents]
        plain_texts = ["".join(part[0] for part in run) for some in runs for run in some if not run[0][1]]
        encoded, encoded_documents = iter(self._encode_with_ends(plain_texts)), []
        for some in runs:
            ids: list[int] = []
            answers: list[bool] = []
            for run in some:
                if run[0][1]:
                    ids += [self.tokenizer.token_to_id(text) or 0 for text, _, _ in run]  # each has one
                    answers += [answer for _, _, answer in run]
                else:
                    characters = [answer for text, _, answer in run for _ in text]
                    begin = 0
                    for number, end in next(encoded):
                        ids.append(number)
                        answers.append(any(characters[min(begin, max(0, end - 1)) : max(1, end)]))
                        begin = end
            encoded_documents.append((ids, answers))
        return encoded_documents

    def _encode_with_ends(self, texts: Sequence[str]) -> Iterator[list[tuple[int, int]]]:
        """Tokenize texts, as `encode_texts`: yield (id, number of characters of the text up to its end) of each text's
        tokens."""
        parts = [self._cut_pattern.split(text) if self._cut_pattern else [text] for text in texts]
        every = [part for some in parts for part in some]
        encoded: Iterator[Any] = iter(self.tokenizer.encode_batch(every, add_special_tokens=False))
        for some in parts:
            tokens: list[tuple[int, int]] = []
            offset = 0
            for part in some:
                e = next(encoded)
                tokens += [(i, offset + end) for i, (_, end) in zip(e.ids, e.offsets, strict=True)]
                offset += len(part)
            yield tokens

    def spell_token(self, number: int) -> str:
        """Return the text by which this tokenizer spells the token of id `number`."""
        return str(self.tokenizer.id_to_token(number))

    @cached_property
    def _cut_pattern(self) -> re.Pattern[str] | None:
        """Return the pattern of places at which texts are cut before they are tokenised, lest the spelling of a special
        token in a text become that token, as in unigram models: behind its first character. None if none would."""
        patterns = []
        for number, token in self.tokenizer.get_added_tokens_decoder().items():
            text = token.content
            if token.special and len(text) > 1:
                spellings = self.tokenizer.encode_batch_fast([text, f"a{text}", f" {text} "], add_special_tokens=False)
                if any(number in e.ids for e in spellings) and text != self.named.get("unk"):
                    patterns.append(f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})")
        return re.compile("|".join(patterns)) if patterns else None

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text that the tokenizer decodes from token ids, special tokens spelled out; skip unknown ids."""
        return self.tokenizer.decode([i for i in ids if 0 <= i < self.size], skip_special_tokens=False)

    @property
    def has_chat(self) -> bool:
        """Return True if the tokenizer has a chat template."""
        return bool(chat_template(self.files))

    @cached_property
    def chat(self) -> ChatTemplate:
        """Return the tokenizer's chat template. Raises ConfigError if it has none."""
        text = chat_template(self.files)
        if not text:
            raise ConfigError("data.chat_template", "", "the tokenizer has none", ["chatml", "a file"])
        return ChatTemplate(text, self.named, self.special_tokens)


def build_vocabulary(files: TokenizerFiles, pretrained: bool = True) -> Vocabulary:
    """Construct a vocabulary from a tokenizer's files, name -> bytes. `pretrained`: False if it was trained here.
    Raises Malformed for files of no tokenizer, and if no special token ends documents."""
    tokenizer = ConfinedTokenizer(files[JSON]) if pretrained else tokenizer_files.parse_tokenizer(files[JSON])
    named = complete_named_tokens(tokenizer, collect_named_tokens(tokenizer_files.read_token_settings(files)))
    for role, token in named.items():
        if half := documents.find_lone_surrogate(token):
            raise Malformed(f"{role}_token is no text: it has {half}")
    if not (special := find_special_ids(tokenizer, named)):
        raise Malformed("names no token that ends documents; data.end_token=TOKEN does")
    return Vocabulary(tokenizer, files, named, special, pretrained)


def open_vocabulary(folder: Path) -> Vocabulary | None:
    """Open the tokenizer that `Vocabulary.save` put into a cache entry; None without one. Raises Malformed, OSError."""
    files = {name: documents.read_bytes(folder / name, 1 << 30) for name in NAMES if (folder / name).is_file()}
    if JSON not in files:
        return None
    return build_vocabulary(files) if CONFIG in files else build_vocabulary(add_own_config(files), pretrained=False)


def add_own_config(files: TokenizerFiles) -> dict[str, bytes]:
    """Return the files of a tokenizer trained on the corpus, and one more that names its special tokens."""
    return add_config_keys(files, OWN)


def load_named_vocabulary(data: Data) -> Vocabulary | None:
    """Return the tokenizer that data.tokenizer names, with the special tokens and the chat template of other keys of
    `data`; None if one is to be trained on the corpus. Raises ConfigError."""
    if data.tokenizer in ("", TRAIN):
        return None
    files = tokenizer_files.read_tokenizer_files(data.tokenizer, data.tokenizer_words)
    roles = {"eos_token": data.end_token, "bos_token": data.begin_token}
    if named_ends := {name: token for name, token in roles.items() if token}:
        files = add_config_keys(files, named_ends)
    template, added = read_chat_template(data), extra_special_tokens(data)
    try:
        template = template or (_fix_template_date(chat_template(files), data) if data.date else "")
        tokenizer = ConfinedTokenizer(files[JSON])
        unknown = (token for token in named_ends.values() if tokenizer.token_to_id(token) is None)
        if lacking := [token for token in unknown if token not in added]:
            raise Malformed(f"has no token {lacking[0]!r}")
        if new := [token for token in added if tokenizer.token_to_id(token) is None]:
            files = {**files, JSON: chat_templates.add_tokens_to_json(files[JSON], new)}
        del tokenizer  # its child is free for the next
        vocabulary = build_vocabulary(files)
    except Malformed as error:
        raise ConfigError(KEY, data.tokenizer, str(error), [TRAIN]) from None
    if CONFIG not in files:
        named = {f"{role}_token": token for role, token in vocabulary.named.items()}
        files = add_config_keys(files, {"tokenizer_class": OWN["tokenizer_class"], **named})
    return replace(vocabulary, files={**files, tokenizer_files.TEMPLATE: template.encode()} if template else files)


def extra_special_tokens(data: Data) -> list[str]:
    """Return the special tokens that the keys of `data` add to a tokenizer's own."""
    return [*data.special_tokens, *(CHATML_TOKENS if data.chat_template == "chatml" else ())]


def read_chat_template(data: Data) -> str:
    """Return the chat template that data.chat_template names, "" if it names none. Raises ConfigError."""
    if data.date:
        with refuse_failures("data.date", data.date, ValueError, why="is no day of the calendar"):
            date.fromisoformat(data.date)
    if data.chat_template in ("", "chatml"):
        return CHATML if data.chat_template else ""
    try:
        text = documents.read_bytes(data.chat_template, _LARGEST_TEMPLATE).decode()
    except (Malformed, OSError, UnicodeDecodeError) as error:
        line = documents.printable_line(error)
        raise ConfigError("data.chat_template", data.chat_template, line, ["chatml"]) from None
    text = _fix_template_date(text, data)
    ChatTemplate(text, {}, [])
    return text


def _fix_template_date(template: str, data: Data) -> str:
    """Return a chat template in which `strftime_now` knows the day data.date, if it asks for the day; as part of its
    text, the day goes where the template goes."""
    if not data.date or "strftime_now" not in template:
        return template
    day = date.fromisoformat(data.date)
    formats = ("%-d", "%-m", *(f"%{letter}" for letter in "YymdBbAajHMSpF"))
    filters = "".join(f" | replace('{form}', '{day.strftime(form)}')" for form in formats)
    return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"


SMALLEST = 257  # entries: one per byte, and END, whose id is 0
_LONGEST = 4096  # characters: longer words are cut for training
_RUN = re.compile("|".join(f"{kind}{{{_LONGEST}}}" for kind in (r"[^\W\d_]", r"\d", r"\s", r"(?:[^\w\s]|_)")))
_WHOLE = 1 << 20  # characters of a document that a given tokenizer encodes as a whole
_BATCH = 500_000  # characters encoded at once; the library needs some 100 bytes per token meanwhile


def train_tokenizer(texts: Iterable[str], vocab: int, special: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most `vocab` entries, the `special` tokens among them, on texts; the same
    texts give the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens, alphabet = list(dict.fromkeys([END, *special])), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((part for text in texts for part in _cut_long_runs(text)), trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _cut_long_runs(text: str) -> list[str]:
    """Cut a training text for the tokenizer after every _LONGEST letters (or digits, spaces, signs) in a row, because
    training takes time quadratic in the length of such a run, which is one word. Return its parts."""
    if len(text) <= _LONGEST or not (runs := list(_RUN.finditer(text))):
        return [text]
    cuts = [0, *(run.end() for run in runs), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if start < end]


def encode_documents(
    vocabulary: Vocabulary, pieces: Iterable[tuple[int, str]], characters: int = 0
) -> Iterator[NDArray[np.uint32]]:
    """Tokenize documents given in pieces, (number of the document, text) each: yield, in parts, one stream of token ids
    with the special tokens `SpecialIds.front` in front of each document. `characters`: total length of the documents,
    to report progress, 0 if unknown."""
    current = -1
    joined_pieces = _join_document_pieces(pieces) if vocabulary.pretrained else pieces
    with show_phase("tokenising", characters, "characters") as shown:
        for batch in _batch_pieces(joined_pieces):
            ids: list[int] = []
            for (document, _), piece_ids in zip(batch, vocabulary.encode_texts([p for _, p in batch]), strict=True):
                if document != current:
                    ids += vocabulary.special.front
                    current = document
                ids += piece_ids
            yield np.array(ids, np.uint32)
            shown.count_done(sum(len(piece) for _, piece in batch))


def _join_document_pieces(pieces: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join the pieces of each document for the tokenizer, because tokens may cross them; yield (number, text). A
    document of more than _WHOLE characters is cut behind the last line end, or before the last space, within as
    many."""
    for document, group in groupby(pieces, itemgetter(0)):
        pending_text = ""
        for _, piece in group:
            pending_text += piece
            if len(pending_text) > _WHOLE:
                *stretches, pending_text = _cut_stretches(pending_text)
                yield from ((document, text) for text in stretches)
        if pending_text:
            yield document, pending_text


def _cut_stretches(text: str) -> Iterator[str]:
    """Yield a document's text in stretches of at most _WHOLE characters for the tokenizer, each up to a line end or at
    least a space if one is near; the last one may be empty."""
    position = 0
    while len(text) - position > _WHOLE:
        end = position + _WHOLE
        line, space = (text.rfind(mark, position + _WHOLE // 2, end) for mark in ("\n", " "))
        end = line + 1 if line >= 0 else space if space >= 0 else end
        yield text[position:end]
        position = end
    yield text[position:]


def _batch_pieces(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Group pieces of documents, (number of the document, text) each, into batches of at least _BATCH characters, which
    the tokenizer encodes at once."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[1])
        if characters >= _BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
