"""The generated tables: the golden order, torch's public generators, what is refused."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from platform.plan.generators import (
    SCHEDULES,
    SHIPPED,
    _build_row,
    build_paired_table,
    generate,
    nearest_legal_microbatches,
)
from platform.plan.schedule import Action, Kind, Schedule, ScheduleError, table
from platform.plan.simulate import simulate, validate_schedule
from tests.plan.blocking import forward_only

GOLDEN = """\
stage 0 | 0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 0B2 0B3 4B4 4B5 4B6 \
4B7 0B4 0B5 0B6 0B7
stage 1 | 1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 5F4 1B0 5F5 1B1 5F6 1B2 5F7 1B3 5B4 5B5 5B6 \
5B7 1B4 1B5 1B6 1B7
stage 2 | 2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 2F7 2B1 6F4 2B2 6F5 2B3 6F6 6B4 6F7 6B5 6B6 \
6B7 2B4 2B5 2B6 2B7
stage 3 | 3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 7F4 7B4 7F5 7B5 7F6 7B6 7F7 \
7B7 3B4 3B5 3B6 3B7"""


def test_interleaved_is_megatrons_order():
    assert table(generate("interleaved", 4, 2, 8).rows) == GOLDEN


def test_one_chunk_interleaved_is_1f1b():
    assert generate("interleaved", 4, 1, 6).rows == generate("1f1b", 4, 1, 6).rows


class StandIn:
    """As much of a torch pipeline stage as its generators look at."""

    has_backward, device, group = True, "cpu", None

    def __init__(self, chunk: int, stages: int, chunks: int):
        self.stage_index, self.num_stages = chunk, stages * chunks
        self.group_size, self.group_rank = stages, chunk % stages
        self.is_first, self.is_last = chunk == 0, chunk == stages * chunks - 1
        self.submod = torch.nn.Identity()
        self.stage_index_to_group_rank = {c: c % stages for c in range(stages * chunks)}


def torch_rows(name: str, stages: int, chunks: int, microbatches: int) -> list[list[str]]:
    """The table of torch's generator of that name; tokens mean the same as ours."""
    mine = [StandIn(chunk * stages, stages, chunks) for chunk in range(chunks)]
    generator = getattr(torch_schedules, name)
    if chunks == 1 and not name.startswith("ScheduleInterleaved"):
        order = generator(mine[0], microbatches, loss_fn=torch.add)._get_pipeline_order()
    else:
        order = generator(mine, microbatches, loss_fn=torch.add).pipeline_order
    return [[str(a) for a in order[r] if a is not None and "REDUCE" not in str(a)] for r in range(stages)]


def rows_of(*case) -> list[list[str]]:
    return [[str(a) for a in row] for row in generate(*case).rows]


def same_group(stages: int, microbatches: int) -> bool:
    """Whether torch and we put as many microbatches into a group: ours is the smallest >= stages that divides."""
    rounds = max(1, microbatches // stages)
    if microbatches < stages or microbatches % rounds:
        return False
    smaller = range(stages, microbatches // rounds)
    return not any(microbatches % n == 0 for n in smaller)


@pytest.mark.parametrize(
    ("kind", "name", "chunks"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", (2, 3, 4)),  # with one chunk torch warms up twice as long as 1F1B
        ("zb_h1", "ScheduleInterleavedZeroBubble", (1, 2, 3)),
    ],
)
def test_equal_to_torchs_interleaved_generators(kind, name, chunks):
    cases = [c for c in itertools.product((1, 2, 3, 4, 8), chunks, range(1, 19)) if same_group(c[0], c[2])]
    assert len(cases) > 100
    for case in cases:
        assert rows_of(kind, *case) == torch_rows(name, *case), case


def test_equal_to_torchs_single_chunk_generators():
    for stages, microbatches in itertools.product((2, 3, 4), (4, 5, 8)):
        assert rows_of("gpipe", stages, 1, microbatches) == torch_rows("ScheduleGPipe", stages, 1, microbatches)
        ours, theirs = (
            rows_of("1f1b", stages, 1, microbatches),
            torch_rows("Schedule1F1B", stages, 1, microbatches),
        )
        assert ours[:-1] == theirs[:-1]
        # torch 2.13 counts the last stage's forward passes from 1 in this table (its runtime does not use it)
        assert [a for a in ours[-1] if "B" in a] == [a for a in theirs[-1] if "B" in a]


def test_actions_print_as_torch_prints_them():
    assert str(Action(Kind.SEND_F, 1, 3, peer=0)) == "3SEND_F1"
    assert [str(a) for a in generate("zb_h1", 1, 1, 2).rows[0]] == ["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_one_chunk_schedules_refuse_several(kind):
    with pytest.raises(ScheduleError, match=f"{kind} has one chunk per stage, not 2"):
        generate(kind, 2, 2, 4)
    assert nearest_legal_microbatches(kind, 2, 2, 4) == []


@pytest.mark.parametrize("kind", ["interleaved", "zb_h1"])
def test_too_few_microbatches_name_the_nearest(kind):
    with pytest.raises(ScheduleError, match="at least as many microbatches as stages=4"):
        generate(kind, 4, 2, 3)
    assert nearest_legal_microbatches(kind, 4, 2, 3) == [4, 5, 6]
    assert nearest_legal_microbatches(kind, 4, 2, 4) is None
    assert nearest_legal_microbatches(kind, 4, 1, 1) is None


def test_nearest_counts_lie_on_both_sides(monkeypatch):
    def even(stages, chunks, microbatches):
        if microbatches % 4:
            raise ScheduleError("must be a multiple of 4")
        return SCHEDULES["interleaved"](stages, chunks, microbatches)

    monkeypatch.setitem(SCHEDULES, "mine", even)
    assert nearest_legal_microbatches("mine", 2, 1, 9) == [4, 8, 12]
    assert generate("mine", 2, 1, 8).name == "mine"


def test_a_generator_of_the_users_is_validated(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "mine", lambda *case: SCHEDULES["gpipe"](*case)[1:])
    with pytest.raises(ScheduleError, match="mine: 1 rows for 2 stages"):
        generate("mine", 2, 1, 2)


def test_placement_is_read_from_the_rows():
    schedule = generate("interleaved", 2, 3, 4)
    assert schedule.placement == (0, 1, 0, 1, 0, 1)
    assert schedule.placement[3] == 1 and schedule.chunks_of_stage(1) == (1, 3, 5)


def test_a_table_prints_a_line_per_stage():
    schedule = forward_only(generate("1f1b", 2, 1, 3))
    assert table(schedule.rows) == "stage 0 | 0F0 0F1 0F2\nstage 1 | 1F0 1F1 1F2"


def test_tables_of_shipped_schedules_are_sound(record_count):
    """`generate` does not check these each time: all of up to six stages and three chunks, and some large ones."""
    small = itertools.product(SHIPPED, range(1, 7), range(1, 4), range(1, 14))
    sizes = [*small, ("zb_h1", 16, 1, 48), ("interleaved", 16, 3, 64), ("1f1b", 32, 1, 40)]
    seen = 0
    cases = [(*size, None) for size in sizes]
    cases += [(*size, build_paired_table) for size in sizes if size[0] == "interleaved"]
    for kind, stages, chunks, microbatches, generator in cases:
        try:
            schedule = generate(kind, stages, chunks, microbatches, generator)
        except ScheduleError:
            continue
        validate_schedule(schedule)
        seen += 1
    assert seen > 400
    record_count("tables of shipped schedules", seen, seen)


IN_PAIRS = """\
stage 0 | 0F0 0F1 0F2 0F3|0B0 0F4|0B1 0F5|0B2 0B3 0B4 0B5
stage 1 | 1F0 1F1|1B0 1F2|1B1 1F3|1B2 1F4|1B3 1F5|1B4 1B5"""


def test_a_forward_pass_runs_with_the_backward_pass_of_an_earlier_microbatch():
    assert table(generate("1f1b", 2, 1, 6, build_paired_table).rows) == IN_PAIRS
    assert table(generate("1f1b", 1, 1, 3, build_paired_table).rows) == "stage 0 | 0F0 0F1|0B0 0F2|0B1 0B2"
    assert table(generate("1f1b", 1, 1, 1, build_paired_table).rows) == "stage 0 | 0F0 0B0"


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_pairs_have_the_bubble_of_1f1b(stages):
    """With one forward pass more in the warm-up than 1F1B has, neighbours would compute in turn."""
    pairs = generate("1f1b", stages, 1, 4 * stages, build_paired_table)
    plain = simulate(generate("1f1b", stages, 1, 4 * stages))
    assert simulate(pairs).bubble == pytest.approx(plain.bubble)
    assert simulate(pairs).peak_live == tuple(2 * (stages - stage) for stage in range(stages))
    rows = []
    for stage in range(stages):
        row, warmup = _build_row(stage, stages, 1, [(m, 0) for m in range(4 * stages)], stages - stage), stages - stage
        rows.append(tuple(replace(a, paired=warmup <= i < 8 * stages - warmup) for i, a in enumerate(row)))
    assert stages == 1 or simulate(replace(pairs, rows=tuple(rows))).bubble > 3 * plain.bubble


@pytest.mark.parametrize(
    "row",
    ["F0 F1* B0", "F0 B0* F1*", "F0 F1* F2* B0 B1 B2", "F0* B0* F1 B1", "F0 F1* I0* W0 I1 W1"],
)
def test_what_is_no_pair_is_refused(row):
    """A backward pass alone, two forward passes, one that waits for its own partner, an input's gradient."""
    actions = [Action(Kind(a[0]), int(a[1]), 0, paired=a.endswith("*")) for a in row.split()]
    count = 1 + max(a.microbatch for a in actions)
    with pytest.raises(ScheduleError, match="is no pair of a forward and a backward pass"):
        validate_schedule(Schedule("mine", 1, 1, count, (tuple(actions),)))
