"""What torchrun's store tells anybody who asks, and what a follower tells whoever answers."""

import json
import os
import socket
import stat
import threading
from contextlib import closing

import pytest
from torch.distributed import TCPStore

from platform.boundary.refusals import ConfigError
from platform.cluster.crew import channel, torchrun
from platform.cluster.crew.channel import Challenge, Line, Welcome, encode_message
from platform.cluster.crew.crew import ByRank
from platform.cluster.crew.launchers import open_crew
from platform.cluster.crew.switchboard import WorkerSwitchboard
from tests.harness.dialled import dialled


@pytest.fixture
def store(monkeypatch):
    """torchrun's, of a job of one process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return store


def test_the_store_holds_neither_secrets_nor_the_configuration(store, job, config):
    config.checkpoint.url = "s3://user:password@host/bucket"
    with open_crew("torchrun", job(1)) as crew:
        held = {key: store.get(key).decode() for key in store.list_keys()}
        assert held, "the followers find the driver by it"
        for value in held.values():
            assert "password" not in value and "checkpoint" not in value
            assert crew._roster.board.member_token(0) not in value and crew._launcher.key not in value
            assert set(json.loads(value)) == {"address", "session"}
    assert "torchrun.key" not in os.listdir(job(1).run_dir)


def test_the_key_is_for_this_user_alone_and_gone_once_all_are_there(store, job, monkeypatch):
    seen = []
    write = torchrun._write_secret_key

    def look(key, file):
        write(key, file)
        seen.append((stat.S_IMODE(file.stat().st_mode), torchrun._read_secret_key(file) == key))

    monkeypatch.setattr(torchrun, "_write_secret_key", look)
    with open_crew("torchrun", job(1)) as crew:
        assert seen == [(0o600, True)] and not (job(1).run_dir / "torchrun.key").exists()
        crew.assign_ranks(job(1), [0])
        assert crew.call_ranks("form", ByRank(range(1)), 1, job(1).config, crew.store, 1, [0])[0].rank == 0


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_can_read_is_none(tmp_path, mode, monkeypatch):
    monkeypatch.setattr(torchrun, "_KEY_SECONDS", 0.0)
    file = tmp_path / "torchrun.key"
    torchrun._write_secret_key("0" * 64, file)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=r"run.dir=.*others can read or write it.*nearest legal: PLATFORM_SECRET"):
        torchrun._find_secret_key(tmp_path)
    monkeypatch.setenv("PLATFORM_SECRET", "a word that all nodes know")
    assert torchrun._find_secret_key(tmp_path) == "a word that all nodes know"
    monkeypatch.setenv("PLATFORM_SECRET", "short")
    with pytest.raises(ConfigError, match="PLATFORM_SECRET: has 5 characters, and must have 16 at least"):
        torchrun._find_secret_key(tmp_path)


@pytest.mark.parametrize("told", ["null", "x", "[]", "{}", '{"address":["h",true],"session":"s"}', "[" * 5000])
def test_what_the_store_may_say(told):
    if told == "null":
        assert torchrun._parse_driver_entry(told.encode()) is None
        return
    with pytest.raises(PermissionError, match="holds what no driver writes"):
        torchrun._parse_driver_entry(told.encode())


def test_whoever_writes_another_address_into_the_store_learns_nothing_and_commands_nobody(store, monkeypatch, tmp_path):
    """A follower dials the stranger: it hears no token, and what it answers is not believed."""
    key = "a word that all nodes know"
    monkeypatch.setenv("PLATFORM_SECRET", key)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torchrun.signal, "signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as stranger, closing(WorkerSwitchboard("127.0.0.1", key)) as board:
        told = {"address": stranger.getsockname(), "session": board.session}
        torchrun._connect_store().set("driver", json.dumps(told))
        ended = []

        def follow():
            with pytest.raises(PermissionError) as caught:
                torchrun.follow_driver(tmp_path)
            ended.append(caught.value)

        follower = threading.Thread(target=follow)
        follower.start()
        connection = Line(stranger.accept()[0])
        connection.send_frame(encode_message(Challenge(channel.new_nonce())))
        heard = next(connection.receive_messages())
        assert board.member_token(1) not in str(heard) and key not in str(heard)
        connection.send_frame(encode_message(Welcome(heard["hello"]["proof"], {"worker": "os:system"})))
        follower.join(20)
        assert len(ended) == 1
        board.expect_members([1])
        assert dialled(board, 1)[0].payload is None  # the true one
