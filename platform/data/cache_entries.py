"""Entries of the cache: the tokens of one source, its training documents and then those held out, and a tokenizer."""

from __future__ import annotations

import fcntl
import logging
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from threading import RLock, Thread
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from platform.boundary import schema
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import EntryBounds, Malformed, OneOf, Span, Text
from platform.config.fields import Data, hash_values
from platform.data import cache, source_kind
from platform.data import text_sources as text_sources  # its import registers the kinds of sources
from platform.data.data_files import DataFile
from platform.data.mixture import DataSource, hash_integers, name_source_in_errors, permute_indices
from platform.data.source_kind import BEGIN, PiecePlace, SourceKind, Texts, find_source_kind, training_options
from platform.data.streams import DocumentStream, Ints, JoinedTokens, PairStream, map_array
from platform.data.token_files import CheckedTokens
from platform.data.tokenizer import Vocabulary, open_vocabulary

logger = logging.getLogger(__name__)
FORMAT = 1  # of a cache entry: raise it when the same documents would give other tokens or other files
_WINDOW = 1 << 22  # tokens that are checked at once
_PLACE = Annotated[int, Span(0, 1 << 50)]


@dataclass(frozen=True)
class _ArrayPlace:
    """Place of tokens in a file of the user's, which is not copied: `count` of a type, from byte `offset` on; `bytes`:
    the size of the file."""

    path: Annotated[str, Text("/.*", "an absolute path")]
    dtype: Annotated[str, OneOf(("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<i8"), "type")]
    offset: _PLACE
    count: _PLACE
    bytes: _PLACE


@dataclass(frozen=True)
class TokenFiles:
    """Description of a source in the cache: where its splits are, (start, end) in tokens; for pairs of texts (number of
    tokens, number of pairs). The tokens are in tokens.bin, of type `dtype`, or, end to end, in `arrays` elsewhere."""

    splits: dict[Annotated[str, OneOf(("train", "validation"), "split")], tuple[_PLACE, _PLACE]]
    files: dict[str, Any]
    dtype: Annotated[str, OneOf(("", "<u2", "<u4"), "type")] = ""
    arrays: list[_ArrayPlace] = field(default_factory=list)
    rules: int = 0  # by which records are read (`SourceKind.rules`); of an earlier version's entry 0

    def hash_tokens(self, folder: Path) -> str:
        """Return a hash of a data source's tokens, which are in its cache entry `folder` and described here."""
        return hash_values([folder.name, self.files.get("tokens.bin")])

    def map_tokens(self, folder: Path, vocab: int) -> list[Any]:
        """Return the arrays of a data source's token ids, mapped into memory from its cache entry `folder`, or from
        files of the user's, then checked against a vocabulary of `vocab` entries as they are read. Raises Malformed or
        OSError if they are not there."""
        if not self.arrays:
            if not self.dtype or "tokens.bin" not in self.files:
                raise Malformed("lacks tokens")
            return [map_array(folder / "tokens.bin", self.dtype)]
        arrays = []
        for array_place in self.arrays:
            if Path(array_place.path).stat().st_size != array_place.bytes:
                raise Malformed(f"{array_place.path} has another size than before")
            if array_place.count:
                array = np.memmap(array_place.path, array_place.dtype, "r", array_place.offset, (array_place.count,))
                arrays.append(CheckedTokens(array.view(np.ndarray), Path(array_place.path), vocab))
        return arrays


def open_entry(
    data: Data, vocab: int, shared_folder: Path | None, existing_vocabulary: Vocabulary | None = None
) -> tuple[Path, TokenFiles]:
    """Open the token cache's entry of the data source `data`: return its folder and its description. The first process
    that asks builds it, in `shared_folder` too if that is given. `vocab`: the most entries of the tokenizer;
    `existing_vocabulary`: the tokenizer; None: one is trained on the source, if it is one of text.

    The entry is named by a hash of the files and of every option that decides about their tokens.
    """
    kind = find_source_kind(data)
    files = kind.find(data)
    entry = cache.cache_root(data.cache) / _name_entry(data, kind, files, vocab, existing_vocabulary)
    read = partial(read_entry, vocab=vocab)

    def build_entry(folder: Path) -> dict[str, Any]:
        """Write the data source's tokens into the empty `folder` of a new cache entry; return its description."""
        return kind.write_cache_entry(folder, files, data, vocab, existing_vocabulary)

    if shared_folder:
        entry, token_files = cache.fetch_shared_entry(entry, shared_folder, build_entry, read)
    else:
        token_files = cache.fetch_entry(entry, build_entry, read)
    if token_files.rules != kind.rules:
        reason = "an earlier version made these tokens; a new one may read more fields, or learn other parts"
        logger.info("%s: %s: delete %s to have them made again", source_kind.source_setting(data), reason, entry)
    return entry, token_files


def _name_entry(
    data: Data, kind: SourceKind, files: Sequence[DataFile], vocab: int, existing_vocabulary: Vocabulary | None
) -> str:
    """Return the name of a data source's entry in the token cache: a hash of all options that decide its tokens."""
    decisive = [*kind.list_cache_key_values(data, files), data.validation, vocab]
    vocabulary_values = [existing_vocabulary.digest] if existing_vocabulary else training_options(data)
    return cache.hash_cache_key([FORMAT, *decisive, *vocabulary_values])


def open_token_streams(folder: Path, entry: TokenFiles, vocab: int) -> dict[str, Any]:
    """Return the token streams in a data source's cache entry, split -> stream; `vocab`: legal ids are below it."""
    arrays = entry.map_tokens(folder, vocab)
    if "ends.bin" in entry.files:
        return _split_pair_streams(arrays[0], np.fromfile(folder / "ends.bin", "<i8").reshape(-1, 2), entry.splits)
    streams: dict[str, Any] = {}
    document_starts = np.fromfile(folder / "starts.bin", "<i8") if "starts.bin" in entry.files else None
    loss_mask = _map_loss_mask(folder) if "learned.bin" in entry.files else None
    for split, (start, end) in entry.splits.items():
        tokens = JoinedTokens(arrays, start, end) if entry.arrays else arrays[0][start:end]
        streams[split] = tokens
        if document_starts is not None and len(document_starts):
            split_mask = None if loss_mask is None else loss_mask[start:end]
            split_starts = document_starts[(document_starts >= start) & (document_starts < end)] - start
            streams[split] = DocumentStream(tokens, split_starts, split_mask)
    return streams


def _map_loss_mask(folder: Path) -> NDArray[np.bool_]:
    """Return a mask of the tokens in a cache entry that count in the loss, mapped into memory."""
    return map_array(folder / "learned.bin", "|b1")


def _split_pair_streams(
    tokens: NDArray[Any], ends: NDArray[np.int64], splits: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Divide the tokens of pairs of texts, whose texts end at `ends` [pairs, 2], into streams by split."""
    streams, first_token, first_pair = {}, 0, 0
    for split, (length, count) in splits.items():
        streams[split] = PairStream(tokens[first_token : first_token + length], ends[first_pair : first_pair + count])
        first_token, first_pair = first_token + length, first_pair + count
    return streams


def read_entry(folder: Path, meta: dict[str, Any], vocab: int, checks_tokens: bool = True) -> TokenFiles:
    """Read the description of a data source's entry in the token cache, `meta`, and check the files in `folder` against
    it. `vocab`: most entries of the tokenizer; `checks_tokens`: True reads every token. Raises Malformed for an entry
    that no kind of source can have made, even if its hashes hold."""
    entry = schema.parse_value(TokenFiles, meta)
    try:
        vocabulary = open_vocabulary(folder)
        entries = vocabulary.size if vocabulary else vocab
        arrays = entry.map_tokens(folder, vocab)
    except Exception as error:  # the library raises its own for a file that it cannot parse
        raise Malformed(str(error)) from None
    total = sum(map(len, arrays))
    train, held_out = (entry.splits.get(split, (-1, -1)) for split in ("train", "validation"))
    if "ends.bin" in entry.files:
        fits = not entry.arrays and _are_pair_ends_legal(
            np.fromfile(folder / "ends.bin", "<i8"), train, held_out, total
        )
    else:
        fits = 0 == train[0] <= train[1] == held_out[0] <= held_out[1] == total
    if not fits or not _has_ascending_starts(folder, entry, total):
        raise Malformed("its splits are not its tokens")
    if "learned.bin" in entry.files:
        loss_mask = _map_loss_mask(folder)
        if (
            len(loss_mask) != total
            or "starts.bin" not in entry.files
            or (checks_tokens and int(loss_mask.view("|u1").max(initial=0)) > 1)
        ):
            raise Malformed("what is to be learned is not said of its tokens")
    if entries > vocab or (checks_tokens and not entry.arrays and _exceeds_vocabulary(arrays[0], entries)):
        raise Malformed("a token is not in the vocabulary")
    return entry


def _exceeds_vocabulary(tokens: NDArray[Any], entries: int) -> bool:
    """Return True if some token id in a cache entry is outside a vocabulary of `entries` tokens."""
    return any(int(tokens[i : i + _WINDOW].max()) >= entries for i in range(0, len(tokens), _WINDOW))


def _has_ascending_starts(folder: Path, entry: TokenFiles, total: int) -> bool:
    """Return True if a cache entry's document starts in starts.bin, if there are any, ascend within `total` tokens."""
    if "starts.bin" not in entry.files:
        return True
    starts = np.fromfile(folder / "starts.bin", "<i8")
    return not len(starts) or bool(starts[0] >= 0 and starts[-1] < total and (np.diff(starts) > 0).all())


def _are_pair_ends_legal(ends: NDArray[np.int64], train: Sequence[int], held: Sequence[int], tokens: int) -> bool:
    """Return True if `ends`, the token positions in ends.bin where source and target of each pair end, rise in each
    split to its number of tokens. `train` and `held` are the splits' (number of tokens, number of pairs); `tokens`:
    their number in tokens.bin."""
    if min(*train, *held) < 0 or train[0] + held[0] != tokens or 2 * (train[1] + held[1]) != len(ends):
        return False
    parts = (ends[: 2 * train[1]], train[0]), (ends[2 * train[1] :], held[0])
    return all((np.diff(part, prepend=0) >= 0).all() and int(part.max(initial=0)) == size for part, size in parts)


@dataclass(frozen=True)
class _Common:
    """Description of what several sources have in common in the cache: a tokenizer, and the names of their entries."""

    entries: Annotated[list[Annotated[str, Text("[0-9a-f]{64}", "the name of an entry")]], EntryBounds(1, 1000)]
    files: dict[str, Any]


def open_common_entry(
    sources: Sequence[DataSource], vocab: int, shared_folder: Path | None, existing_vocabulary: Vocabulary | None = None
) -> tuple[Path, list[str]]:
    """Return the cache folder of the tokenizer that several data sources share, of at most `vocab` entries, and the
    names of their own entries. Unless one is `existing_vocabulary`, it is trained on all of them by the first process
    that asks. `shared_folder`: a folder that other machines see, to which the entry is copied."""
    sources_with_files = []
    for source in sources:
        with name_source_in_errors(source):
            kind = find_source_kind(source.data)
            sources_with_files.append((source, kind, kind.find(source.data)))
    textual = [(source, kind, files) for source, kind, files in sources_with_files if kind.texts and source.is_trained]
    tokenised = [source for source, kind, _ in sources_with_files if not kind.texts]
    if textual and tokenised and not existing_vocabulary:
        reason = "a tokenizer that is trained on text would not be that of these tokens"
        key = f"{tokenised[0].config_key}.kind={tokenised[0].data.kind}"
        raise ConfigError(f"{key}: beside {textual[0][0].config_key}: {reason}")
    decisive = [
        [*kind.list_cache_key_values(s.data, files), s.data.validation] for s, kind, files in sources_with_files
    ]
    options = [existing_vocabulary.digest] if existing_vocabulary else training_options(sources[0].data)
    entry_name = cache.hash_cache_key([FORMAT, "common", decisive, vocab, *options])
    entry_folder = cache.cache_root(sources[0].data.cache) / entry_name

    def build_common_entry(folder: Path) -> dict[str, Any]:
        """Save the data sources' common tokenizer in `folder`, trained on texts if none is given; return their entries'
        names."""
        vocabulary = existing_vocabulary
        if existing_vocabulary:
            existing_vocabulary.save(folder)
        elif textual:
            texts_by_source = [_read_training_texts(*part) for part in textual]
            characters = sum(t.characters for t in texts_by_source)
            texts = Texts(chain.from_iterable(t.pieces for t in texts_by_source), characters)
            vocabulary = source_kind.train_vocabulary(folder, texts, vocab, sources[0].data)
        names = [_name_entry(s.data, kind, files, vocab, vocabulary) for s, kind, files in sources_with_files]
        return {"entries": names}

    if shared_folder:
        folder, common = cache.fetch_shared_entry(entry_folder, shared_folder, build_common_entry, read_common_entry)
        return folder, common.entries
    return entry_folder, cache.fetch_entry(entry_folder, build_common_entry, read_common_entry).entries


def _read_training_texts(source: DataSource, kind: SourceKind, files: Sequence[DataFile]) -> Texts:
    """Return the texts of a mixture's data source for a tokenizer to be trained on; errors in them name the source."""

    def yield_pieces(source_texts: Texts) -> Iterator[str]:
        """Yield the pieces of texts for a tokenizer's training; errors in them name the mixture's data source."""
        with name_source_in_errors(source):
            yield from source_texts.pieces

    with name_source_in_errors(source):
        training_texts = kind.read_training_texts(files, source.data)
    return Texts(yield_pieces(training_texts), training_texts.characters)


def read_common_entry(folder: Path, meta: dict[str, Any]) -> _Common:
    """Read `meta`, the description of a tokenizer that several data sources share in the cache. Raises Malformed."""
    return schema.parse_value(_Common, meta)


# Streams: sources that are read and tokenised while they are trained on, block by block; the newest blocks are kept.
#
# A block is whole documents in the order of the source, up to the one in which it reaches data.block characters (one
# that alone has as many again is cut). Its tokens are cut into samples like the tokens of a whole source, and these
# come in an order drawn from (seed, epoch, block); blocks follow each other, and after the last one the first comes
# again. So the order of samples is a function of the source and the seed.
#
# | entry in the cache | holds                                              | is deleted                            |
# |--------------------|----------------------------------------------------|---------------------------------------|
# | head               | the tokenizer, and the documents held out          | never                                 |
# | block N            | the tokens of the block                            | by who has opened KEPT blocks since   |
# | end N              | where block N ends, the samples up to there        | never                                 |
#
# Each is made by the first process that asks, while others wait. A run that resumes reads on from the end that it
# finds, and tokenises nothing but the block that it is in.

KEPT = 8  # blocks whose tokens stay in the cache
_COUNT = Annotated[int, Span(0, 1 << 50)]
_LAST = -1  # in place of a file: the source has no more
_END = "end-{:08d}"

T = TypeVar("T")


@dataclass(frozen=True)
class _BlockEnd:
    """Description of an end: the file in which the next block begins, -1 if there is none, and the pieces before it
    there; the samples of all blocks up to this one."""

    file: Annotated[int, Span(_LAST, 1 << 50)]
    piece: _COUNT
    samples: _COUNT
    files: dict[str, Any]

    @property
    def is_last(self) -> bool:
        """Return True if the streamed data source ends with this block."""
        return self.file == _LAST


class _Located(NamedTuple):
    """Block of a sample in the endless order: its epoch and number, the number of its first sample in that order, and
    how many it has."""

    epoch: int
    block: int
    first: int
    samples: int


@dataclass
class StreamedTokens:
    """Training tokens of a source that is streamed. `folder`: folder of its blocks; `write(folder, documents)` makes
    the entry of a block, and returns its description; `read` reads it; `cut` opens it as a stream of tokens, and
    `count` says how many samples that has."""

    folder: Path
    reader: source_kind.BlockReader
    write: Callable[[Path, list[tuple[int, Any]]], dict[str, Any]]
    read: Callable[[Path, dict[str, Any]], TokenFiles]
    cut: Callable[[Path, TokenFiles], Any]
    count: Callable[[Any], int]
    seed: int
    _ends: dict[int, _BlockEnd] = field(default_factory=dict)
    _opened: dict[int, Any] = field(default_factory=dict)
    _newest: int = -1  # of the ends that are there, from the first one on
    _turn: RLock = field(default_factory=RLock)

    def __post_init__(self) -> None:
        """Find out up to which block the cache folder of this streamed data source knows the ends of blocks."""
        cached_names = {path.name for path in self.folder.glob("end-*")}
        while _END.format(self._newest + 1) in cached_names:
            self._newest += 1

    def open_first_block(self) -> Any:
        """Return the tokens of this streamed data source's first block. Raises ConfigError, OSError."""
        return self._open_block(0)

    def locate_samples(self, numbers: Ints) -> Iterator[tuple[Any, Ints, Ints]]:
        """Yield each block of this streamed data source that has some of the training samples `numbers`, which ascend:
        its token stream, which of `numbers` these are, and their indices in it. Raises ConfigError, OSError."""
        left = 0
        while left < len(numbers):
            epoch, block, first, samples = self._locate_sample(int(numbers[left]))
            right = int(np.searchsorted(numbers, first + samples))
            index = permute_indices(self.seed, hash_integers(epoch, block), samples, numbers[left:right] - first)
            yield self._open_block(block), np.arange(left, right), index
            left = right

    def locate_documents(self, stream: Any) -> tuple[int, list[PiecePlace]]:
        """Return the number of the block that has been yielded as `stream`, and where its documents begin."""
        block = next(number for number, opened in self._opened.items() if opened is stream)
        end = self._find_block_end(block)
        stop = None if end.is_last else PiecePlace(end.file, end.piece)
        return block, self.reader.find_document_starts(self._find_block_start(block), stop)

    def _locate_sample(self, number: int) -> _Located:
        """Find the block of this streamed data source that has training sample `number`; blocks up to it are tokenised
        if no run has done so."""
        end = self._find_block_end(max(self._newest, 0))
        while not end.is_last and number >= end.samples:
            end = self._find_block_end(self._newest + 1)
        epoch, index = divmod(number, end.samples) if end.is_last else (0, number)
        block = bisect_right(range(self._newest + 1), index, key=lambda n: self._find_block_end(n).samples)
        before = self._samples_before_block(block)
        return _Located(epoch, block, number - index + before, self._find_block_end(block).samples - before)

    def _samples_before_block(self, block: int) -> int:
        """Return the number of training samples in this streamed source's blocks before block number `block`."""
        return self._find_block_end(block - 1).samples if block else 0

    def _find_block_start(self, block: int) -> PiecePlace:
        """Return the place (file, piece) in the streamed data source at which block number `block` begins."""
        return (
            PiecePlace(self._find_block_end(block - 1).file, self._find_block_end(block - 1).piece) if block else BEGIN
        )

    def _find_block_end(self, block: int) -> _BlockEnd:
        """Return where a block of this streamed source ends, from the cache; a block never read before is tokenised
        now."""
        if block not in self._ends:
            entry = self.folder / _END.format(block)
            if not (block_end := cache.read_verified_entry(entry, _read_block_end)):
                start = self._find_block_start(block)  # not while others wait for us
                before = self._samples_before_block(block)

                def tokenize_block(_: Path) -> dict[str, Any]:
                    """Tokenize the block; return the description of its end: place in the source, samples so far."""
                    documents, after = self.reader.read_block(start)
                    shutil.rmtree(self._block_folder(block).parent, ignore_errors=True)  # of an interrupted run
                    file, piece = after or PiecePlace(_LAST, 0)
                    samples = before + self.count(self._fetch_block_tokens(block, lambda: documents))
                    return {"file": file, "piece": piece, "samples": samples}

                block_end = self._fetch_entry_once("ends", entry, tokenize_block, _read_block_end)
            self._ends[block] = block_end
            self._newest = max(self._newest, block)
        return self._ends[block]

    def _block_folder(self, block: int) -> Path:
        """Return the cache folder for the tokens of block number `block` of this streamed data source."""
        return self.folder / f"block-{block:08d}" / "tokens"

    def _fetch_block_tokens(self, block: int, documents: Callable[[], list[tuple[int, Any]]]) -> Any:
        """Return the token stream of a block from the cache; if it is not there, tokenise the block's `documents()`."""
        tokens_folder = self._block_folder(block)
        return self._fetch_entry_once(
            "blocks",
            tokens_folder,
            lambda folder: self.write(folder, documents()),
            # at once: others delete what they have read
            lambda folder, meta: self.cut(folder, self.read(folder, meta)),
        )

    def _read_block_stream(self, block: int) -> Any:
        """Return the token stream of block number `block` of a streamed source, tokenised first if it is not cached."""
        self._find_block_end(block)
        start = self._find_block_start(block)
        return self._fetch_block_tokens(block, lambda: self.reader.read_block(start)[0])

    def _open_block(self, block: int) -> Any:
        """Return the token stream of a streamed source's block, which stays open, and tokenise the next block in a
        thread meanwhile. Blocks that this process opened long before are deleted."""
        if block not in self._opened:
            self._opened[block] = self._read_block_stream(block)
            self._delete_old_blocks()
            following = 0 if self._find_block_end(block).is_last else block + 1
            Thread(target=self._prefetch_block, args=(following,), daemon=True).start()
        return self._opened[block]

    def _delete_old_blocks(self) -> None:
        """Delete the cached tokens of blocks that this process has opened long before. While another process makes a
        block, which may be one of them for its next epoch, they stay until the next call."""
        with _hold_entry_lock(self.folder, "blocks", waits=False) as holds_lock:
            for old in list(self._opened)[:-KEPT] if holds_lock else ():
                self._opened.pop(old, None)
                shutil.rmtree(self._block_folder(old).parent, ignore_errors=True)

    def _prefetch_block(self, block: int) -> None:
        """Tokenize a block of this streamed source ahead of the training steps that will read it; ignore errors."""
        with suppress(Exception):  # who asks for it meets the same
            self._read_block_stream(block)

    def _fetch_entry_once(
        self,
        kind: str,
        entry: Path,
        make: Callable[[Path], dict[str, Any]],
        read: Callable[[Path, dict[str, Any]], T],
    ) -> T:
        """Return a cache entry of this streamed data source, read by `read`; if it is missing, one process makes it by
        `make` while others wait for the lock of this `kind` of entry."""
        if (content := cache.read_verified_entry(entry, read)) is not None:
            return content
        with self._turn, _hold_entry_lock(self.folder, kind):
            return cache.fetch_entry(entry, make, read)


def _read_block_end(folder: Path, meta: dict[str, Any]) -> _BlockEnd:
    """Read `meta`, the cached description of where a streamed source's block ends. Raises Malformed."""
    return schema.parse_value(_BlockEnd, meta)


@contextmanager
def _hold_entry_lock(folder: Path, kind: str, waits: bool = True) -> Iterator[bool]:
    """Hold the lock, within the context, by which one process alone makes a kind of cache entry of a streamed source;
    nothing where the file system has no locks. Yield False where another process holds it, unless this one `waits`."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        file = (folder / f"{kind}.lock").open("w")
    except OSError:
        yield True  # what is to be written there says why it can't be
        return
    with file:
        is_taken = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            is_taken = True
        except OSError:
            pass
        yield not is_taken
