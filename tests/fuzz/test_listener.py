"""The listener under what strangers send; see tests/fuzz/listener.py."""

import pytest

from platform.cluster.crew import channel
from platform.cluster.crew.channel import Garbled
from platform.cluster.crew.switchboard import WorkerSwitchboard
from tests.fuzz import listener
from tests.fuzz.runner import run


def test_strangers_harm_nobody():
    """A fixed seed, for some seconds."""
    outcome = run(listener, 0, 12_000, seconds=5)
    assert sum(outcome.counts.values()) >= 150, outcome.table()
    print(outcome.table())


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_a_hundred_thousand_strangers_harm_nobody():
    outcome = run(listener, 1_000_000, 100_000)
    assert min(outcome.counts.values()) >= 100, outcome.table()


class Credulous(WorkerSwitchboard):
    def _take_message(self, connection, message):
        """Members may say anything."""
        try:
            hear(self, connection, message)
        except Garbled:
            self._events.append((connection.number or 0, message))


hear, proof = WorkerSwitchboard._take_message, channel.compute_proof
CARELESS = {
    "every member has the same token": (
        WorkerSwitchboard,
        "member_token",
        lambda self, number: channel.member_token(self._key, self.session, 0),
    ),
    "a flood is let in": (WorkerSwitchboard, "_drop_oldest_unauthenticated", lambda self: False),
    "members may say anything": (WorkerSwitchboard, "_take_message", Credulous._take_message),
    "who is gone is kept": (WorkerSwitchboard, "_report_lost_connection", lambda self, connection: None),
    "a greeting opens any connection": (
        channel,
        "compute_proof",
        lambda own, who, challenge, nonce: proof(own, who, "", nonce),
    ),
}


@pytest.mark.parametrize("how", CARELESS)
def test_a_listener_that_is_not_careful_is_found(monkeypatch, how):
    monkeypatch.setattr(*CARELESS[how])
    monkeypatch.setattr(listener, "PATIENCE", 0.5)
    with pytest.raises(AssertionError):
        run(listener, 0, 3000)
