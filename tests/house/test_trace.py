"""The tracer of walks, on calls that are written down: what is on the path from one call to another, and what not."""

from __future__ import annotations

import pytest

from tests.house.trace import CREW, HOST, Call, Moment, hops, moments_in, path


def stack(*names: str, process: int = 1) -> tuple[Call, ...]:
    """Return calls `NUMBER:FILE:NAME`, or `NUMBER:FILE:NAME:OWNER`, as a process's."""
    parts = [(*name.split(":"), "0")[:4] for name in names]
    return tuple(Call(process, int(number), file, called, int(owner)) for number, file, called, owner in parts)


def files(first, second) -> list[str]:
    return [call.file for call in path(first, second)]


def test_up_to_where_both_meet_and_down():
    first = stack("1:main:run", "2:load:load", "3:parse:parse")
    second = stack("1:main:run", "9:train:train", "10:step:step")
    assert files(first, second) == ["parse", "load", "main", "main", "train", "step"]


def test_an_object_hands_on_what_one_method_leaves_to_another():
    first = stack("1:main:run", "2:worker:form:7", "3:plan:plan")
    second = stack("1:main:run", "9:worker:step:7", "10:model:model")
    assert files(first, second) == ["plan", "worker", "worker", "model"]
    other = stack("1:main:run", "9:worker:step:8", "10:model:model")
    assert files(first, other) == ["plan", "worker", "main", "main", "worker", "model"]


def test_the_nearest_meeting_place_counts():
    first = stack("1:main:run:5", "2:worker:form:7", "3:plan:plan")
    second = stack("1:main:run:5", "2:worker:form:7", "4:inner:inner")
    assert files(first, second) == ["plan", "worker", "worker", "inner"]


def test_a_walk_leads_through_the_latest_call_before_the_next_point():
    load, early, late = stack("1:m:m", "2:a:f"), stack("1:m:m", "3:old:x", "4:b:g"), stack("1:m:m", "5:new:x", "6:b:g")
    moments = [Moment(t, calls) for t, calls in enumerate([load, early, late, stack("1:m:m", "7:c:h")])]
    assert hops(["a:f", "b:g", "c:h"], moments) == ["a", "m", "new", "b", "c"]
    with pytest.raises(LookupError):
        hops(["c:h", "b:g"], moments)


def test_a_workers_calls_stand_on_the_drivers(tmp_path):
    def note(process: int, at: float, *calls: str) -> None:
        rows = [[process, n, *call.split(":"), 0] for n, call in enumerate(calls)]
        with open(tmp_path / f"{process}.jsonl", "a") as file:
            file.write(f"{[at, rows]}\n".replace("'", '"'))

    note(1, 1.0, "m:main", CREW)
    note(2, 2.0, "fork:work", HOST, "w:step")
    note(1, 3.0, "m:main", "end:end")
    found = moments_in(tmp_path)
    (worker,) = (m for m in found if m.process == 2)
    assert [call.file for call in worker.calls] == ["m", CREW.split(":")[0], HOST.split(":")[0], "w"]
    assert hops(["w:step", "end:end"], found) == ["w", HOST.split(":")[0], CREW.split(":")[0], "m", "end"]
