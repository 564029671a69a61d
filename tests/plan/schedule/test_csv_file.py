"""A user's own schedule in a file."""

import pytest

from platform.plan.generators import generate, read_schedule_csv
from platform.plan.schedule import ScheduleError
from tests.harness.schedule_files import to_csv


@pytest.mark.parametrize("case", [("gpipe", 3, 1, 2), ("interleaved", 2, 3, 5), ("zb_h1", 4, 2, 8), ("1f1b", 1, 1, 1)])
def test_round_trip(tmp_path, case):
    schedule = generate(*case)
    to_csv(schedule, tmp_path / "mine.csv")
    read = read_schedule_csv(tmp_path / "mine.csv")
    assert read.name == "mine" and read.rows == schedule.rows
    assert (read.stages, read.chunks, read.microbatches) == case[1:]


def read(tmp_path, text: str):
    (tmp_path / "mine.csv").write_text(text)
    return read_schedule_csv(tmp_path / "mine.csv")


def test_empty_cells_are_bubbles_and_chunks_lie_anywhere(tmp_path):
    schedule = read(tmp_path, "0F0,,, ,3F0, 3B0,,,0B0\n,1F0,2F0,,,,2I0,1B0,,2W0\n\n")
    assert schedule.placement == (0, 1, 1, 0)
    assert [str(a) for a in schedule.rows[1]] == ["1F0", "2F0", "2I0", "1B0", "2W0"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0F0,0X0,0B0\n", "stage 0: 0X0 is no action"),
        ("0F0,0SEND_F0,0B0\n", "stage 0: 0SEND_F0 is no action"),
        ("", "the table has no backward pass"),
        ("0F0\n1F0\n", "the table has no backward pass"),
        ("0F0,1F0,2F0,2B0,1B0,0B0\n3F0,3B0,4F0,4B0\n", "5 chunks are not a multiple of 2 stages"),
        ("0B0,0F0\n", "0B0 stands before 0F0"),
    ],
)
def test_refused(tmp_path, text, line):
    with pytest.raises(ScheduleError) as error:
        read(tmp_path, text)
    assert error.value.violations[0].startswith(line)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ScheduleError, match="cannot be read .*No such file"):
        read_schedule_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_schedule_csv(tmp_path / "binary.csv")
