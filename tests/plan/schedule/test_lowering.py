"""Sends and receives, and the tables that are refused."""

import random

import pytest

from platform.plan.generators import generate
from platform.plan.schedule import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule, ScheduleError
from platform.plan.simulate import lower_schedule, validate_schedule
from tests.plan.blocking import forward_only, replay_blocking


def rows(*lines: str) -> tuple[tuple[Action, ...], ...]:
    """Rows from tokens; a message carries its peer: 0SEND_F0>1."""

    def action(token: str) -> Action:
        token, _, peer = token.partition(">")
        chunk, rest = token[0], token[1:]
        return Action(Kind(rest[:-1]), int(rest[-1]), int(chunk), int(peer) if peer else None)

    return tuple(tuple(action(token) for token in line.split()) for line in lines)


def schedule(*lines: str, chunks: int = 1, microbatches: int = 2) -> Schedule:
    return Schedule("mine", len(lines), chunks, microbatches, rows(*lines))


def test_every_receive_stands_beside_its_send():
    lowered = lower_schedule(schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    assert lowered == rows(
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0>1 0B0 0RECV_B1>1 0B1",
        "1RECV_F0>0 1RECV_F1>0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0",
    )
    replay_blocking(lowered)


def test_chunks_of_one_stage_need_no_message():
    assert lower_schedule(generate("interleaved", 1, 3, 2)) == generate("interleaved", 1, 3, 2).rows
    v_shaped = schedule("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", chunks=2, microbatches=1)
    sent = [str(a) for row in lower_schedule(v_shaped) for a in row if a.kind in SENDS]
    assert sent == ["0SEND_F0", "3SEND_B0", "2SEND_F0", "1SEND_B0"]


def test_zero_bubble_sends_after_the_input_gradient():
    [_, last] = lower_schedule(generate("zb_h1", 2, 1, 2))
    order = [str(a) for a in last if a.kind not in RECEIVES]
    assert order == ["1F0", "1I0", "1SEND_B0", "1F1", "1I1", "1SEND_B1", "1W0", "1W1"]


def test_two_stages_see_all_their_messages_in_one_order():
    """With two stages and several chunks previous and next are the same peer: tags must not be needed."""
    first, second = lower_schedule(generate("interleaved", 2, 3, 6))
    names = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}

    def messages(row):
        out = []
        for a in row:
            if a.kind not in COMPUTE:
                kind, shift = names.get(a.kind, (a.kind, 0))
                out.append((kind, a.chunk + shift, a.microbatch))
        return out

    assert messages(first) == messages(second) and len(messages(first)) == 2 * 5 * 6


def test_evaluation_lowers():
    lowered = lower_schedule(forward_only(generate("interleaved", 2, 2, 4)))
    replay_blocking(lowered)
    assert {a.kind for row in lowered for a in row} == {Kind.FORWARD, Kind.SEND_F, Kind.RECV_F}


def random_table(rng: random.Random) -> Schedule:
    """Any legal table: chunks placed at will, and their actions in any order that the dependencies allow."""
    stages, chunks, microbatches = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 5)
    total = stages * chunks
    homes = list(range(stages)) + [rng.randrange(stages) for _ in range(total - stages)]
    rng.shuffle(homes)
    path = {
        m: iter([("F", c) for c in range(total)] + [("B", c) for c in reversed(range(total))])
        for m in range(microbatches)
    }
    table = [[] for _ in range(stages)]
    weights = []
    while path or weights:
        if weights and (not path or rng.random() < 0.3):
            action = weights.pop(rng.randrange(len(weights)))
        else:
            m = rng.choice(list(path))
            step = next(path[m], None)
            if step is None:
                del path[m]
                continue
            action = Action(Kind(step[0]), m, step[1])
            if step[0] == "B" and rng.random() < 0.5:
                action = Action(Kind.INPUT, m, step[1])
                weights.append(Action(Kind.WEIGHT, m, step[1]))
        table[homes[action.chunk]].append(action)
    return Schedule("random", stages, chunks, microbatches, tuple(map(tuple, table)))


def test_any_legal_table_runs_with_blocking_sends():
    for seed in range(1000):
        replay_blocking(lower_schedule(random_table(random.Random(seed))))


def test_a_table_with_two_actions_exchanged_runs_or_is_refused():
    refused = 0
    for seed in range(500):
        rng = random.Random(seed)
        table = random_table(rng)
        row = rng.choice(table.rows)
        i, j = rng.randrange(len(row)), rng.randrange(len(row))
        mixed = list(row)
        mixed[i], mixed[j] = mixed[j], mixed[i]
        other = tuple(tuple(mixed) if r is row else r for r in table.rows)
        try:
            replay_blocking(lower_schedule(Schedule("mixed", table.stages, table.chunks, table.microbatches, other)))
        except ScheduleError:
            refused += 1
    assert 100 < refused < 450


REFUSED = [
    (schedule("0F0 0B0 0B1 0F1", "1F0 1B0 1F1 1B1"), ["0B1 stands before 0F1"]),
    (schedule("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), ["0B1 is missing"]),
    (schedule("0F0 0F1 0I0 0B1", "1F0 1B0 1F1 1B1"), ["0W0 is missing"]),
    (schedule("0F0 0F1 0B0 0I0 0W0 0B1", "1F0 1B0 1F1 1B1"), ["0B0 repeats 0I0 and 0W0"]),
    (schedule("0F0 0F1 0W0 0I0 0B1", "1F0 1B0 1F1 1B1"), ["0W0 stands before 0I0"]),
    (schedule("0F0 0F1 0B0 0B1 0B1", "1F0 1B0 1F1 1B1"), ["0B1 occurs 2 times"]),
    (schedule("0F0 0F1 1B0 0B0 0B1", "1F0 1F1 1B1"), ["stage 1: 1F0, but chunk 1 lives on stage 0"]),
    (schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0"), ["2B0 is missing", "2F1 is missing", "2B1 is missing"]),
    (schedule("0F0 0F1 0B0 0B1 0F7", "1F0 1B0 1F1 1B1"), ["stage 0: 0F7 is no computation of 2 chunks and 2 micro"]),
    (schedule("0F0 0SEND_F0>1 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), ["stage 0: 0SEND_F0 is no computation of"]),
    (
        schedule("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
        ["deadlock: stage 0 is stuck at 0B0, which waits for 1B0; stage 1 is stuck at 1F1, which waits for 0F1"],
    ),
]


@pytest.mark.parametrize(("table", "lines"), REFUSED, ids=[lines[0] for _, lines in REFUSED])
def test_refused(table, lines):
    for function in (validate_schedule, lower_schedule):
        with pytest.raises(ScheduleError) as error:
            function(table)
        for line in lines:
            assert any(v.startswith(line) for v in error.value.violations), error.value.violations
        assert "\nstage 0 | 0F0 " in str(error.value)  # the table is printed


def test_all_violations_are_named_at_once():
    with pytest.raises(ScheduleError) as error:
        validate_schedule(schedule("0B0 0F0 0F1", "1F0 1B0 1B1"))
    assert error.value.violations == ["0B0 stands before 0F0", "0B1 is missing", "1F1 is missing"]


def test_replay_refuses_sends_that_cross():
    """Each stage sends before it receives: fine while sends are buffered, a deadlock once they block."""
    crossed = rows("0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0>1 0B0", "1RECV_F0>0 1F0 1B0 1SEND_B0>0 1RECV_F1>0 1F1")
    with pytest.raises(ScheduleError, match="where sends block: stage 0 waits at 0SEND_F1 for stage 1; stage 1"):
        replay_blocking(crossed)


def test_replay_refuses_what_is_not_there_yet():
    late = rows("0F0 0SEND_F0>1", "1F0 1RECV_F0>0")
    with pytest.raises(ScheduleError, match="stage 1: 1F0 runs before 0F0 is there"):
        replay_blocking(late)
    with pytest.raises(ScheduleError, match="stage 1 waits at 1RECV_F0 for stage 0"):
        replay_blocking(rows("0F0", "1RECV_F0>0 1F0"))
    with pytest.raises(ScheduleError, match="stage 0 waits at 0SEND_F0 for stage 1"):
        replay_blocking(rows("0F0 0SEND_F0>1", "1RECV_F1>0 1F0"))
