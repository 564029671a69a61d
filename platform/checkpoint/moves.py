"""Restoring a checkpoint under any plan: every stored byte is read once per job, by one worker, and passed to all ranks
that hold a part of it.

All ranks compute alike which rank reads which blocks: the stored blocks, in the order of the files, are divided into n
equal stretches. So reads are long, contiguous and of whole blocks, each covered by a SHA-256; the split of the tensors
at saving and the present one only change the messages between ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.boundary.sealed_blocks import LARGEST_BLOCK
from platform.boundary.storage import Storage
from platform.checkpoint.blocks import ITEMSIZE, Block, Box, HeldTensor, Piece, S, State
from platform.checkpoint.buffer import DTYPES, Messages
from platform.checkpoint.catalogue import list_stored_pieces, read_pieces
from platform.checkpoint.manifest import Corrupt, Manifest, Refused, StoredBlock, check_tensors

FAILURES = (Corrupt, Refused, OSError)  # of which every rank raises the one that any rank met

Fetch = Callable[[Sequence[Piece[S]], Sequence[Tensor]], None]
"""Fills the memory given for every piece, uint8 [bytes], contiguous. Raises one of FAILURES."""
AllGather = Callable[[Any], list[Any]]
"""Gathers a plain value of every rank of the job on all ranks, in rank order."""
Exchange = Callable[[Messages, Messages], None]
"""Sends and receives bytes among the job's ranks, (peer, uint8 tensor) each; returns when all that is to be received is
there. All ranks call it together."""
Failure = tuple[int, str] | None
"""Why `Fetch` failed on a rank: the index of the error's class in FAILURES, and its text."""
Holders = dict[str, list[tuple[Box, tuple[int, ...]]]]  # tensor -> (block, its holders) in order
Blocks = dict[str, list[Block]]  # tensor -> a rank's own blocks of it, in order


def gather_single_rank(value: Any) -> list[Any]:
    """Return a value as the list [value]: the all-gather of a checkpoint's restore in a single process."""
    return [value]


def note_nothing(done: int, total: int) -> None:
    """Say nothing of how far the restoring of a checkpoint is."""


def exchange_nothing(sent: Messages, received: Messages) -> None:
    """Check that there are no messages: the exchange of a checkpoint's restore in a single process."""
    assert not sent and not received, "there is nobody to talk to"


class World(NamedTuple):
    """Ranks of a job that pass blocks of its training state to each other, as this one of them sees it: its `rank`,
    the `size` of all, their `all_gather` and their `exchange`. `budget`: bytes that a rank receives per `exchange`, on
    average; `note`: called with the bytes that this rank has read, and with all that it reads."""

    rank: int = 0
    size: int = 1
    all_gather: AllGather = gather_single_rank
    exchange: Exchange = exchange_nothing
    budget: int = 256 << 20
    note: Callable[[int, int], None] = note_nothing


ALONE = World()


def restore_checkpoint(
    storage: Storage, directory: str, manifest: Manifest, state: State, blocks: Sequence[Block], world: World = ALONE
) -> None:
    """Fill this rank's `blocks` from a checkpoint that any plan saved; all ranks call it together. Padding, beyond the
    global tensor, becomes zero.

    `state`: every tensor to restore and who holds its blocks now, equal on all ranks; values are converted if the
    checkpoint has another element type. Raises, on every rank alike, Refused if the checkpoint lacks such a tensor,
    Corrupt or OSError if any rank cannot read the stored bytes: the blocks are then undefined.
    """
    check_tensors(manifest, {t.name: t.shape for t in state})
    pieces = list_stored_pieces(manifest, [t.name for t in state])
    fill_blocks(pieces, build_block_fetch(storage, directory), state, blocks, world)


def fill_blocks(
    pieces: Sequence[Piece[S]], fetch: Fetch[S], state: State, blocks: Sequence[Block], world: World = ALONE
) -> None:
    """Fill this rank's `blocks` of training state from stored pieces of global tensors; all ranks call it together.
    `pieces`: pieces that tile the tensors of `state`, each of which one rank reads by `fetch` and sends to the ranks
    whose blocks it overlaps. For the other parameters see `restore_checkpoint`. Raises one of FAILURES on every rank
    alike."""
    clear_padding(state, blocks)
    exchange_pieces(assign_readers(pieces, state, world), fetch, state, blocks, world)


def assign_readers(pieces: Sequence[Piece[S]], state: State, world: World) -> Iterator[list[list[Piece[S]]]]:
    """Yield, by turn, the pieces of a checkpoint that each rank reads and passes on; arguments as of `fill_blocks`."""
    itemsize = {piece.name: ITEMSIZE[piece.dtype] for piece in pieces}
    placed = ((itemsize[t.name], box, ranks) for t in state for box, ranks in t.holders.items())
    placed_bytes = sum(box.num_elements * len(ranks) * size for size, box, ranks in placed)
    total = sum(piece.nbytes for piece in pieces)
    turn_bytes = max(LARGEST_BLOCK, world.budget * world.size * total // max(placed_bytes, 1))
    turns = divide_pieces(pieces, -(-total // turn_bytes))
    yield from (divide_pieces(turn, world.size) for turn in turns)


def read_tensor(storage: Storage, directory: str, manifest: Manifest, name: str, box: Box | None = None) -> Tensor:
    """Read a global tensor of a checkpoint into memory, or its block `box`, in its stored type. Raises Refused or
    OSError."""
    stored = manifest.tensors[name]
    box = box or Box.whole_tensor(stored.shape)
    tensor = torch.empty(box.extent, dtype=DTYPES[stored.dtype])
    held = HeldTensor(name, stored.dtype, stored.shape, {box: (0,)})
    pieces = [piece for piece in list_stored_pieces(manifest, [name]) if piece.box.intersect_box(box)]
    fill_blocks(pieces, build_block_fetch(storage, directory), [held], [Block(name, box, tensor)])
    return tensor


def build_block_fetch(storage: Storage, directory: str) -> Fetch[StoredBlock]:
    """Return the function that reads stored blocks of the checkpoint in `directory` and verifies their SHA-256."""

    def fetch_blocks(pieces: Sequence[Piece[StoredBlock]], into: Sequence[Tensor]) -> None:
        """Read stored blocks of the checkpoint into the memory given for each, and verify them."""
        read_pieces(storage, directory, pieces, [memory.numpy().data for memory in into])

    return fetch_blocks


def divide_pieces(pieces: Sequence[Piece[S]], count: int) -> list[list[Piece[S]]]:
    """Divide pieces of a checkpoint's tensors, in order, into `count` lists of about equal bytes; some may be empty."""
    total, at = sum(piece.nbytes for piece in pieces), 0
    divided: list[list[Piece[S]]] = [[] for _ in range(count)]
    for piece in pieces:
        divided[at * count // total].append(piece)
        at += piece.nbytes
    return divided


def clear_padding(state: State, blocks: Sequence[Block]) -> None:
    """Set what of this rank's blocks lies beyond their tensor (a padded vocab) to 0: checkpoints hold no padding."""
    shapes = {t.name: t.shape for t in state}
    for name, box, tensor in blocks:
        for d, (start, size, end) in enumerate(zip(*box, shapes[name], strict=True)):
            real = min(max(end - start, 0), size)
            tensor.detach().narrow(d, real, size - real).zero_()


def exchange_pieces(
    turns: Iterable[Sequence[Sequence[Piece[S]]]], fetch: Fetch[S], state: State, blocks: Sequence[Block], world: World
) -> None:
    """Fill this rank's `blocks` of training state with the stored pieces that all ranks read and send to each other,
    one exchange per turn; all ranks call it together.

    `turns`: per turn and rank, the pieces that it passes on; `fetch`: gets their bytes; `state`: tensors with the
    present holders of their blocks; `turns` and `state` are equal on all ranks. Raises one of FAILURES on every rank
    alike if `fetch` does on any: the blocks are then undefined.
    """
    holders = {t.name: sorted(t.holders.items()) for t in state}
    own_blocks: Blocks = defaultdict(list)
    for block in sorted(blocks, key=lambda b: b.box):
        own_blocks[block.name].append(block)
    turns = list(turns)
    done, total = 0, sum(piece.nbytes for senders in turns for piece in senders[world.rank])
    for senders in turns:
        sent, failure = _build_messages(senders[world.rank], fetch, holders, own_blocks, world)
        for kind, reason in filter(None, world.all_gather(failure)):
            raise FAILURES[kind](reason)
        others = ((sender, pieces) for sender, pieces in enumerate(senders) if sender != world.rank)
        missing_pieces = {sender: [p for p in pieces if world.rank not in p.had] for sender, pieces in others}
        sizes = {sender: _count_message_bytes(pieces, own_blocks) for sender, pieces in missing_pieces.items()}
        received = [(sender, torch.empty(n, dtype=torch.uint8)) for sender, n in sizes.items() if n]
        world.exchange(sent, received)
        for sender, message in received:
            _unpack_message(message, missing_pieces[sender], own_blocks)
        done += sum(piece.nbytes for piece in senders[world.rank])
        world.note(done, total)


class _Region(NamedTuple):
    """Place of a part of a fetched piece (number `piece` of the turn) in a message: uint8 [bytes]."""

    piece: int
    part: Box
    memory: Tensor


def _build_messages(
    pieces: Sequence[Piece[S]], fetch: Fetch[S], holders: Holders, own_blocks: Blocks, world: World
) -> tuple[Messages, Failure]:
    """Fetch a checkpoint's `pieces`, fill this rank's blocks (`own_blocks`) with its own parts, and return the
    messages, (receiving rank, uint8 [bytes]) each, of the parts that lie in others' blocks, and why `fetch` failed, as
    a rank that raised here would leave its peers waiting for its message.

    A piece is fetched at once to where it belongs, a block of this rank or a message that takes it whole, and is copied
    from there to wherever else it belongs.
    """
    messages, regions = _allocate_messages(pieces, holders, world)
    targets = [_find_destination_memory(piece, own_blocks) if world.rank not in piece.had else None for piece in pieces]
    is_in_place = [buffer is not None for buffer in targets]
    for region in regions:
        if targets[region.piece] is None and region.part == pieces[region.piece].box:
            targets[region.piece] = region.memory
    pairs = zip(pieces, targets, strict=True)
    buffers = [torch.empty(p.nbytes, dtype=torch.uint8) if buffer is None else buffer for p, buffer in pairs]
    try:
        fetch(pieces, buffers)
    except FAILURES as error:
        return [], (next(i for i, failure in enumerate(FAILURES) if isinstance(error, failure)), str(error))
    for number, part, memory in regions:
        piece, buffer = pieces[number], buffers[number]
        if memory is not buffer:
            size = DTYPES[piece.dtype].itemsize
            memory.view(*part.extent, size).copy_(buffer.view(*piece.box.extent, size)[part.relative_slices(piece.box)])
    for piece, buffer, done in zip(pieces, buffers, is_in_place, strict=True):
        if not done and world.rank not in piece.had:
            _place_piece(piece, buffer, own_blocks)
    return messages, None


def _allocate_messages(pieces: Sequence[Piece[S]], holders: Holders, world: World) -> tuple[Messages, list[_Region]]:
    """Allocate a message (uint8) for each rank that lacks parts of a checkpoint's `pieces` in its blocks, and return
    the messages with their receivers, and the places of all parts in them; this rank sends itself no message. Ranks
    with the same parts (replicas) get the same message."""
    parts: list[list[tuple[int, Box]]] = [[] for _ in range(world.size)]
    for number, piece in enumerate(pieces):
        for held, ranks in holders.get(piece.name, ()):
            if part := piece.box.intersect_box(held):
                for receiver in ranks:
                    if receiver != world.rank and receiver not in piece.had:
                        parts[receiver].append((number, part))
    regions: list[_Region] = []
    built: dict[tuple[tuple[int, Box], ...], Tensor] = {}
    for key in map(tuple, parts):
        if key and key not in built:
            sizes = [part.num_elements * DTYPES[pieces[number].dtype].itemsize for number, part in key]
            built[key] = message = torch.empty(sum(sizes), dtype=torch.uint8)
            regions += [_Region(*entry, memory) for entry, memory in zip(key, message.split(sizes), strict=True)]
    return [(receiver, built[tuple(p)]) for receiver, p in enumerate(parts) if p], regions


def _find_destination_memory(piece: Piece[S], own_blocks: Blocks) -> Tensor | None:
    """Return memory of this rank's blocks into which a stored piece can be read, uint8 [bytes]; None if none suits."""
    for _, outer, tensor in own_blocks.get(piece.name, ()):
        if piece.box.intersect_box(outer) == piece.box:
            view = tensor.detach()[piece.box.relative_slices(outer)]
            if view.dtype == DTYPES[piece.dtype] and view.device.type == "cpu" and view.is_contiguous():
                return view.view(-1).view(torch.uint8)
    return None


def _count_message_bytes(pieces: Sequence[Piece[S]], own_blocks: Blocks) -> int:
    """Return the bytes of another rank's message: the parts of stored `pieces` in this rank's blocks (`own_blocks`)."""
    parts = ((p, p.box.intersect_box(outer)) for p in pieces for _, outer, _ in own_blocks.get(p.name, ()))
    return sum(part.num_elements * ITEMSIZE[piece.dtype] for piece, part in parts if part)


def _unpack_message(message: Tensor, pieces: Sequence[Piece[S]], own_blocks: Blocks) -> None:
    """Copy another rank's message of restored state into this rank's blocks. `pieces`: the stored pieces that the
    sender read and this rank did not; `own_blocks`: tensor name -> this rank's blocks, sorted. The message holds the
    overlap of every piece with every block of its tensor, by piece, then by block."""
    at = 0
    for piece in pieces:
        size = DTYPES[piece.dtype].itemsize
        for _, outer, tensor in own_blocks.get(piece.name, ()):
            if part := piece.box.intersect_box(outer):
                end = at + part.num_elements * size
                tensor.detach()[part.relative_slices(outer)].copy_(_view_as_tensor(message[at:end], piece.dtype, part))
                at = end
    assert at == len(message), "sender and receiver agree on who holds what"


def _place_piece(piece: Piece[S], data: Tensor, own_blocks: Blocks) -> None:
    """Copy a stored piece of a tensor that this rank has fetched, uint8 [bytes], into its blocks (`own_blocks`)."""
    values = _view_as_tensor(data, piece.dtype, piece.box)
    for _, outer, tensor in own_blocks.get(piece.name, ()):
        if part := piece.box.intersect_box(outer):
            tensor.detach()[part.relative_slices(outer)].copy_(values[part.relative_slices(piece.box)])


def _view_as_tensor(data: Tensor, dtype: str, box: Box) -> Tensor:
    """Return the stored bytes of a block of a global tensor, uint8 [bytes], as its elements, in the shape of `box`."""
    if data.storage_offset() % DTYPES[dtype].itemsize:
        data = data.clone()  # view() needs an offset aligned to the type
    return data.view(DTYPES[dtype]).view(box.extent)
