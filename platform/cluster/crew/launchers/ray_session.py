"""What is asked of Ray itself: to start, to join, what it has free, and which of its nodes are about to go."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from platform.cluster.crew.launchers import leftovers
from platform.config.fields import ConfigError, violation

_CONNECT_SECONDS = 2.0
_NOTICE_SECONDS = 2.0  # between two questions whether a node is about to go
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": as there, Ray's address is that of loopback
_OBJECT_STORE_BYTES = 100 << 20  # no tensor travels through it; shared memory is for the workers


class Embedded:
    """A Ray of our own on this machine, with room for `size` workers: nobody else's cluster is joined, nothing is
    reported, and nothing is left of it when this process is gone, however that ends."""

    def __init__(self, size: int, *, gpus: bool):
        directory = _short_temporary_directory()  # this user's alone; Ray opens its own to everybody
        command = [sys.executable, "-I", leftovers.__file__, directory]
        # a session of its own: the terminal's Ctrl-C is not for it
        self._leftovers = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._opened = ExitStack()
        self._opened.enter_context(_private(Path(directory, "token")))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ[leftovers.MARK] = directory
        try:
            _init(
                address="local",
                _temp_dir=f"{directory}/ray",
                _node_ip_address="127.0.0.1",
                num_cpus=size,  # workers are logical: more of them than cores is slow and legal
                num_gpus=size if gpus else 0,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _system_config={"worker_niceness": 0},  # Ray's default of 15 starves workers beside anything else
            )
        except BaseException:
            self.close()
            raise
        finally:
            del os.environ[leftovers.MARK]

    def close(self) -> None:
        """After Ray was left."""
        self._opened.close()
        assert self._leftovers.stdin
        self._leftovers.stdin.close()
        self._leftovers.wait()


@contextmanager
def _private(token: Path) -> Iterator[None]:
    """Ray as it starts inside is for who can read the file `token`, which this makes, and for this machine alone. All
    that it starts inherits the environment."""
    from ray._private import ray_constants

    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), _CLUSTERS: "0"}
    taken = {name: os.environ.pop(name, None) for name in (*own, "RAY_AUTH_TOKEN")}
    os.environ.update(own)
    clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    _look_again_for_the_token()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        for name, value in taken.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _look_again_for_the_token()


def _look_again_for_the_token() -> None:
    """Ray reads mode and token once per process. The mode first: a thread of a Ray that is being left would else look
    for a token that is gone, and abort this process."""
    raylet: Any = import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def connect() -> None:
    """Joins the cluster at RAY_ADDRESS, or the one on this machine. Raises ConfigError where there is none."""
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        _knock(address)
        _init(address=address)
    except (OSError, RayError, ValueError, RuntimeError) as error:  # Ray has words of its own for an address
        reason = str(error).strip().partition("\n")[0]
        constraint = f"no Ray cluster at RAY_ADDRESS={address} ({reason}); start one with `ray start --head`"
        raise ConfigError(violation("cluster", "ray", constraint, ["cluster=local"])) from None


def _knock(address: str) -> None:
    """Raises OSError where nobody listens at HOST:PORT: Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def free_resources() -> dict[str, float]:
    """What the joined cluster has free: {"CPU": ..., "GPU": ...}."""
    import ray

    return ray.available_resources()


def accelerators() -> list[str]:
    """The types of accelerators that the nodes of the joined cluster have, such as H100 and A100-80G."""
    import ray

    return [name.partition(":")[2] for name in ray.cluster_resources() if name.startswith("accelerator_type:")]


def _init(**arguments: Any) -> None:
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # `uv run` would rebuild the environment per worker
    import ray

    on_term = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, runtime_env=_runtime_env(), **arguments)
    finally:
        signal.signal(signal.SIGTERM, on_term)  # Ray puts its own there
    _hush()


def _hush() -> None:
    """Ray prints pages into our output about every process that dies, whatever `log_to_driver` says, and has no public
    way to stop it. The journal has what there is to say."""
    import ray

    with suppress(AttributeError):  # another version: it prints
        worker: Any = ray._private.worker.global_worker
        worker.threads_stopped.set()
        worker.gcs_error_subscriber.close()


def _runtime_env() -> dict[str, Any] | None:
    """What makes workers find this package where it is not installed; see platform/_startup.py."""
    if "_platform_startup" in sys.modules:
        return None
    root = str(Path(__file__).parents[4])
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}}


def _short_temporary_directory() -> str:
    """Ray puts Unix sockets there, whose path may have 107 characters: a long TMPDIR would not do."""
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    return tempfile.mkdtemp(prefix="ray-")


class Notices:
    """`nodes`: those of the joined cluster that will soon be taken away, by their Ray ids. A thread keeps it true."""

    def __init__(self) -> None:
        self.nodes: frozenset[str] = frozenset()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Before Ray is left: it is not asked any more."""
        self._closed.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._closed.wait(_NOTICE_SECONDS):
            with suppress(Exception):  # a Ray that does not answer, or not to this, gives no notice
                self.nodes = _draining_nodes()


def _draining_nodes() -> frozenset[str]:
    """Ray has no public way to ask this: it is what Ray Train asks."""
    import ray

    return frozenset(ray._private.state.state.get_draining_nodes())
