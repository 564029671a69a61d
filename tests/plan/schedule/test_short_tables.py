"""Memory is predicted from a short table: each row of it has all in memory at once that a long one's has."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import pytest

from platform.plan.generators import Generator, build_paired_table, generate, representative_microbatches
from platform.plan.schedule import SENDS_IN_FLIGHT, Action, Kind
from platform.plan.simulate import lower_schedule

State = tuple[frozenset, tuple, frozenset, frozenset]  # numbers of tensors, sends, begun and complete gradients


def list_memory_states(row: Sequence[Action], last_chunk: int) -> set[State]:
    """Return all that a stage has in memory at once along its row, by what it is and of what chunk."""
    ends = {a.chunk: i for i, a in enumerate(row) if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}
    tensors, sending, begun, states = Counter(), deque(maxlen=SENDS_IN_FLIGHT), set(), set[State]()

    def note(i: int) -> None:
        complete = frozenset(chunk for chunk, end in ends.items() if end < i)
        states.add((frozenset((+tensors).items()), tuple(sending), frozenset(begun), complete))

    def take(received: tuple, local: tuple) -> None:
        """Take a pass's input: received from another stage, or left by a pass on this one."""
        tensors[received if tensors[received] else local] -= 1

    for i, a in enumerate(row):
        c, kind = a.chunk, a.kind
        if kind in (Kind.RECV_F, Kind.RECV_B):
            tensors[kind, c] += 1
        elif kind in (Kind.SEND_F, Kind.SEND_B):
            tensors[kind, c] -= 1
            sending.append((kind, c))
        elif kind is Kind.FORWARD:
            if c:
                take((Kind.RECV_F, c), (Kind.SEND_F, c - 1))
            tensors["kept", c] += 1
            tensors[Kind.SEND_F, c] += c < last_chunk
        elif kind is Kind.WEIGHT:
            tensors["pending", c] -= 1
            begun.add(("weights", c))
        else:
            note(i)
            if c < last_chunk:
                take((Kind.RECV_B, c), (Kind.SEND_B, c + 1))
            tensors["kept", c] -= 1
            tensors["pending", c] += kind is Kind.INPUT
            tensors[Kind.SEND_B, c] += c > 0
            begun.add(c)
        note(i)
    return states


def find_missed_states(
    kind: str,
    stages: int,
    chunks: int,
    shorten: Callable[[str, int, int, int], int] = representative_microbatches,
    generator: Generator | None = None,
) -> list[str]:
    """Return a line for each row of a long table that has states which the row of the short one lacks."""
    missed, last_chunk = [], stages * chunks - 1
    for long in sorted({4 * stages, 4 * stages + 1, 5 * stages + 3, 8 * stages, 32}):
        if (short := shorten(kind, stages, chunks, long)) < long:
            tables = (lower_schedule(generate(kind, stages, chunks, m, generator)) for m in (long, short))
            for stage, rows in enumerate(zip(*tables, strict=True)):
                of_long, of_short = (list_memory_states(row, last_chunk) for row in rows)
                if lacking := len(of_long - of_short):
                    missed.append(f"{short} microbatches for {long}: stage {stage} lacks {lacking} states")
    return missed


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, pytest.param(12, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "kind, chunks", [("1f1b", 1), ("zb_h1", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 6)]
)
def test_short_rows_have_every_state(kind, chunks, stages):
    """So that the peak is the same, whatever the sizes of tensors are."""
    assert not find_missed_states(kind, stages, chunks)
    if kind != "zb_h1":
        assert not find_missed_states(kind, stages, chunks, generator=build_paired_table), "in pairs"


def test_negative_control_a_table_that_is_too_short():
    def shorten(kind, stages, chunks, microbatches):
        return min(microbatches, 2 * stages)

    assert find_missed_states("interleaved", 5, 3, shorten)
