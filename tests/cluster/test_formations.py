"""Workers that die or stop while a generation forms cost nothing but another formation."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist

from platform.cluster.crew.job import GLOO_ENVIRONMENT
from platform.runtime import process_groups
from platform.runtime.process_groups import join_default_group, leave_default_group
from tests.cluster.test_chaos import PLANS, configured, of
from tests.cluster.test_chaos import survives as survives  # a fixture
from tests.doubles.struck_worker import FILE, draw_strikes

pytestmark = pytest.mark.timeout(900)
STRUCK = "tests.doubles.struck_worker:StruckWorker"


def strike_row(generation, rank, place, number=signal.SIGKILL, seconds=0.0):
    return {"generation": generation, "rank": rank, "place": place, "signal": number, "seconds": seconds}


@pytest.fixture
def struck(tmp_path, survives):
    """Has a run whose first failure is at step 3 struck as rows say, compares it, and counts the strikes done."""

    def survive(config, rows):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / FILE).write_text(json.dumps(rows))
        events = survives(config, ["3:kill:0"], worker=STRUCK)
        return events, sorted(folder.glob("struck-*"))

    return survive


@pytest.mark.usefixtures("warm_server")
def test_a_second_death_while_a_mesh_connects_costs_a_formation(tmp_path, struck):
    """torch counts the groups of a process; who joined in vain counted on, and never met the newcomer again."""
    config = configured(tmp_path, "two", spares=0, steps=8)
    config.elastic.attempts = 3
    events, done = struck(config, [strike_row(3, 1, "join")])  # generation 2 is of the survivor alone
    assert len(done) == 1 and of(events, "forming")[-1]["world_size"] == 2


@pytest.mark.full
@pytest.mark.usefixtures("warm_server")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spares", range(2))
@pytest.mark.parametrize("plan", PLANS)
def test_strikes_in_six_formations_after_each_other(tmp_path, struck, plan, spares, seed):
    config = configured(tmp_path, plan, spares, steps=8)
    config.elastic.attempts = 20
    _, done = struck(config, draw_strikes(random.Random(f"{plan} {spares} {seed}"), 6, 2 if plan == "two" else 8))
    assert done


def _join_in_turn(number, port, turns):
    """Join alone, in vain, in each of `turns`; then with the other."""
    for turn in range(turns + 1):
        process_groups.connect_timeout = lambda size, vain=turn < turns: timedelta(seconds=0.5 if vain else 20)
        try:
            store = dist.PrefixStore(f"{number} {turn}" if turn < turns else "", dist.TCPStore("127.0.0.1", port))
            join_default_group(store, number, 2, "cpu")
        except RuntimeError:
            assert turn < turns, "they do not meet"
            leave_default_group()
    dist.barrier()
    leave_default_group()


@pytest.mark.parametrize("turns", [(0, 0), (2, 0), (0, 1)], ids=str)
def test_who_joined_in_vain_meets_who_did_not(turns, monkeypatch):
    for name, value in GLOO_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    fork = multiprocessing.get_context("fork")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [fork.Process(target=_join_in_turn, args=(i, store.port, n)) for i, n in enumerate(turns)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
