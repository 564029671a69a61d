"""What is fetched goes at once to where it belongs, and nowhere else if it belongs nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from platform.checkpoint.blocks import Block, Box, HeldTensor, Piece
from platform.checkpoint.manifest import Corrupt
from platform.checkpoint.moves import ALONE, World, exchange_pieces

ROWS = [Box((0, 0), (2, 6)), Box((2, 0), (3, 6))]  # of a tensor [5, 6], as pieces
TYPES = {"whole": torch.float32, "columns": torch.float32, "strided": torch.float32, "another type": torch.float64}


def blocks_of(kind: str) -> list[Block]:
    """This rank's blocks of that tensor."""
    dtype = TYPES[kind]
    if kind == "columns":
        return [Block("w", Box((0, at), (5, 3)), torch.zeros(5, 3)) for at in (0, 3)]
    return [
        Block(
            "w",
            Box.whole_tensor((5, 6)),
            torch.zeros(6, 5).t() if kind == "strided" else torch.zeros(5, 6, dtype=dtype),
        )
    ]


def filled(kind: str, numbers: Tensor) -> tuple[list[Block], bool]:
    """The blocks after all was passed on, and whether it was fetched into their own memory."""
    blocks, in_place = blocks_of(kind), []

    def fetch(wanted, into) -> None:
        for piece, memory in zip(wanted, into, strict=True):
            assert memory.shape == (piece.nbytes,) and memory.is_contiguous()
            memory.copy_(numbers[piece.source].contiguous().view(-1).view(torch.uint8))
            in_place.append(
                any(memory.untyped_storage().data_ptr() == b.tensor.untyped_storage().data_ptr() for b in blocks)
            )

    state = [HeldTensor.group_holders("w", TYPES[kind], (5, 6), [(0, b.box) for b in blocks])]
    pieces = [Piece("w", "float32", box, slice(box.offset[0], box.offset[0] + box.extent[0])) for box in ROWS]
    exchange_pieces([[pieces]], fetch, state, blocks, ALONE)
    assert len(set(in_place)) == 1
    return blocks, in_place[0]


@pytest.mark.parametrize("kind", TYPES)
def test_into_the_block_itself_where_it_lies_there_byte_by_byte(kind):
    numbers = torch.arange(30, dtype=torch.float32).view(5, 6)
    blocks, in_place = filled(kind, numbers)
    assert in_place == (kind == "whole")
    for block in blocks:
        assert torch.equal(block.tensor.float(), numbers[block.box.relative_slices(Box.whole_tensor((5, 6)))])


def test_a_piece_for_one_other_rank_is_fetched_into_its_message():
    """And one that several ranks have parts of is not; what both get is right."""
    numbers = torch.arange(30, dtype=torch.float32).view(5, 6)
    halves = [Box((0, 0), (5, 3)), Box((0, 3), (5, 3))]
    for boxes, whole in (([Box((0, 0), (2, 6)), Box((2, 0), (3, 6))], True), (halves, False)):
        state = [HeldTensor.group_holders("w", torch.float32, (5, 6), [(r + 1, box) for r, box in enumerate(boxes)])]
        messages: dict[int, Tensor] = {}
        fetched: list[Tensor] = []

        def fetch(wanted, into, fetched=fetched) -> None:
            for piece, memory in zip(wanted, into, strict=True):
                memory.copy_(numbers[piece.source].contiguous().view(-1).view(torch.uint8))
                fetched.append(memory)

        def exchange(sent, received, messages=messages) -> None:
            messages |= dict(sent)
            assert not received  # nothing for rank 0 from anybody

        pieces = [Piece("w", "float32", box, slice(box.offset[0], box.offset[0] + box.extent[0])) for box in ROWS]
        exchange_pieces([[pieces, [], []]], fetch, state, [], World(0, 3, lambda told: [told] * 3, exchange))
        own = {m.untyped_storage().data_ptr() for m in messages.values()}
        assert all((m.untyped_storage().data_ptr() in own) == whole for m in fetched)
        assert [*messages] == [1, 2]
        for box, message in zip(boxes, messages.values(), strict=True):
            wanted = numbers[box.relative_slices(Box.whole_tensor((5, 6)))]
            values = message.view(torch.float32)
            assert sorted(values.tolist()) == sorted(wanted.flatten().tolist())


def test_a_failure_is_every_rank_s():
    def fetch(wanted, into) -> None:
        raise Corrupt("a bit has flipped")

    state = [HeldTensor.group_holders("w", torch.float32, (5, 6), [(0, Box.whole_tensor((5, 6)))])]
    pieces = [Piece("w", "float32", ROWS[0], slice(0, 2))]
    with pytest.raises(Corrupt, match="^a bit has flipped$"):
        exchange_pieces([[pieces]], fetch, state, blocks_of("whole"), ALONE)
