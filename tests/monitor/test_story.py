"""What happened, for people."""

from platform.monitor.story import story

JOURNAL = [
    {"event": "starting", "time": 0.0},
    {"event": "done", "time": 1.0, "step": 3},
    {"event": "starting", "time": 100.0},
    {"event": "forming", "time": 103.0, "generation": 2, "world_size": 4, "mesh": {"stage": 1, "data": 2, "t": 2}},
    {"event": "formed", "time": 103.5, "generation": 2, "workers": []},
    {"event": "first_step", "time": 104.25, "step": 1},
    {"event": "failure", "time": 110.0, "rank": 3, "kind": "died", "method": "step(9)", "cause": "x\nby SIGKILL"},
    {"event": "released", "time": 110.125, "alive": 3, "lost": [3], "seconds": 0.125},
    {"event": "forming", "time": 110.5, "generation": 3, "world_size": 1, "mesh": {"stage": 1, "data": 1}},
    {"event": "restored", "time": 111.0, "step": 8, "source": "memory", "seconds": 0.25},
    {"event": "first_step", "time": 112.0, "step": 9},
    {"event": "released", "time": 113.0},
    {"event": "done", "time": 113.0, "step": 10},
]


def test_the_last_driver_is_told():
    assert story(JOURNAL).splitlines() == [
        "what happened (seconds since the start)",
        "     3.00  generation 2: 4 workers, data 2 x t 2",
        "     4.25  step 1 is done",
        "    10.00  rank 3 died in step(9): by SIGKILL",
        "    10.12  3 workers left, free after 0.12 s",
        "    10.50  generation 3: 1 worker, 1",
        "    11.00  goes on after step 8, from memory in 0.25 s",
        "    12.00  step 9 is done",
        "    13.00  done: step 10",
    ]
