"""What the doctor finds before a mesh forms: who is not sound gets no seat, a spare has it, and all of it is told."""

import pytest

from tests.doubles.fake_crew import Dead
from tests.harness.scripted_run import events, names, once_each, seats

SLOW = {"gemm": 1e8}


@pytest.fixture
def config(config):
    config.cluster.doctor = "quick"
    return config


def sick(**of):
    """Prepares a crew: `gemm_1=...`: findings of member 1."""

    def prepare(crew):
        for what, value in of.items():
            kind, _, number = what.partition("_")
            {"slow": crew.findings, "denied": crew.errors, "late": crew.late_clocks}[kind][int(number)] = value

    return prepare


def test_sound_workers_are_examined_once_and_seated(config, drive):
    config.elastic.spares = 1
    assert drive({"step(3)": [{1: Dead}]}) == 0 and once_each(config)
    assert drive.crew.examined[:5] == [0, 1, 2, 3, 4]  # the spare too, which then takes a seat at once
    first, *later = events(config, "examined")
    assert (first["numbers"], first["unsound"], first["reasons"], first["shared"]) == ([0, 1, 2, 3, 4], [], [], [])
    assert names(config).index("examined") < names(config).index("forming")
    assert seats(config)[:2] == [[0, 1, 2, 3], [0, 4, 2, 3]] and not later
    assert "doctor" not in drive.out


@pytest.mark.parametrize(
    ("ill", "said"),
    [
        ({"slow_2": SLOW}, "gemm: 100 MFLOP/s, where its peers have 1 GFLOP/s"),
        ({"slow_2": {"wrong": 1.0}}, "wrong: 1 wrong numbers"),
        ({"denied_2": {"write": "No space left on device"}}, "write: No space left on device"),
        ({"late_2": 90.0}, "clock: 90 s, where 1 s is the most"),
        ({"late_2": -90.0}, "clock: 90 s, where 1 s is the most"),
    ],
)
def test_a_spare_takes_the_seat_of_one_that_is_not_sound(config, drive, ill, said):
    config.elastic.spares = 1
    assert drive(prepare=sick(**ill)) == 0 and once_each(config)
    assert seats(config) == [[0, 1, 3, 4]]
    [examined] = events(config, "examined")
    assert examined["unsound"] == [2] and examined["reasons"] == [f"worker 2 on n0: {said}"]
    assert f"doctor  worker 2 on n0: {said}: it gets no seat" in drive.out
    assert drive.crew.examined.count(2) == 3  # it was given every chance


def test_who_is_sound_the_second_time_is_sound(config, drive):
    def once(crew):
        examined = type(crew.workers[2]).examine_device

        class Hasty(type(crew.workers[2])):
            def examine_device(self, thorough):
                crew.findings[2] = SLOW if 2 not in crew.examined else {}
                return examined(self, thorough)

        crew.workers[2].__class__ = Hasty

    assert drive(prepare=once) == 0
    assert seats(config) == [[0, 1, 2, 3]] and events(config, "examined")[0]["unsound"] == []
    assert drive.crew.examined.count(2) == 2


def test_too_few_sound_ones_are_said_and_end_the_run_at_once(config, drive):
    config.elastic.wait = 1000.0
    assert drive(prepare=sick(slow_1=SLOW)) == 1
    [end] = events(config, "gave_up")
    assert end["cause"].startswith("3 of 4 workers there, and elastic.min_workers is not set; left out: worker 1 on")
    assert "gemm: 100 MFLOP/s" in end["cause"] and not seats(config)
    assert "nothing was saved" in drive.out


def test_enough_sound_ones_go_on(config, drive):
    config.elastic.min_workers, config.elastic.wait = 2, 1000.0
    assert drive(prepare=sick(slow_1=SLOW)) == 0 and once_each(config)
    assert seats(config) == [[0, 2, 3]]


def test_what_most_have_leaves_nobody_out_and_is_said(config, drive):
    assert drive(prepare=sick(denied_0={"write": "a"}, denied_1={"write": "b"}, denied_3={"write": "c"})) == 0
    assert seats(config) == [[0, 1, 2, 3]]
    assert "most workers are alike in this, and none is left out: write: a" in drive.out
    assert events(config, "examined")[0]["shared"] == ["write: a"]


def test_a_node_that_rejoins_is_examined_and_left_out(config, drive):
    """Number 4 is hired for a dead one. It is slower than those who have been there."""
    assert drive({"step(3)": [{1: Dead}]}, prepare=sick(slow_4=SLOW)) == 0 and once_each(config)
    assert [e["numbers"] for e in events(config, "examined")] == [[0, 1, 2, 3], [4]]
    assert events(config, "examined")[1]["unsound"] == [4]
    assert all(4 not in members for members in seats(config)) and len(seats(config)) >= 2
    assert [len(members) for members in seats(config)][-1] == 3


def test_those_who_have_worked_are_not_barred_by_a_later_look(config, drive):
    def slower(crew):
        crew.findings[0] = SLOW
        return {1: Dead}

    assert drive({"step(3)": [slower]}) == 0 and once_each(config)
    assert all(e["unsound"] == [] for e in events(config, "examined")) and 0 in seats(config)[-1]


def test_who_dies_while_it_is_examined_is_replaced(config, drive):
    config.elastic.wait = 60.0  # for the new one, on a busy machine
    assert drive({"examine": [{1: Dead}]}) == 0 and once_each(config)
    assert events(config, "failure")[0]["method"] == "examine" and 1 not in seats(config)[0]


@pytest.mark.parametrize(("doctor", "nodes", "looks"), [("off", 2, 0), ("auto", 1, 0), ("auto", 2, 1), ("quick", 1, 1)])
def test_when_it_looks(config, drive, doctor, nodes, looks):
    config.cluster.doctor = doctor
    assert drive(nodes=nodes, prepare=sick(slow_1=SLOW)) == (1 if looks else 0)
    assert len(events(config, "examined")) == looks
