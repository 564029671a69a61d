"""Session with Ray: start an embedded one or join a cluster, and query free resources and draining nodes."""

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
_NOTICE_SECONDS = 2.0  # interval of the queries for draining nodes
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray uses the loopback address, as on those systems
_OBJECT_STORE_BYTES = 100 << 20  # small: no tensor goes through it, and workers need the shared memory


class Embedded:
    """Private Ray instance on this machine with room for `size` workers, but on `gpus` for no more than there are GPUs.
    It joins no other cluster, reports no usage statistics, and leaves no process or file behind when this process ends,
    however it ends. `directory`: of its files, and of others that are to go with it; only this user can read it."""

    def __init__(self, size: int, *, gpus: bool):
        # readable by this user alone; Ray's own directory is open to all
        self.directory = directory = _short_temporary_directory()
        command = [sys.executable, "-I", leftovers.__file__, directory]
        # in its own session, so that Ctrl-C in the terminal does not reach it
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
                num_cpus=size,  # logical CPUs, one per worker: more than cores is slow but allowed
                num_gpus=min(size, _gpus()) if gpus else 0,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _system_config={"worker_niceness": 0},  # Ray's default of 15 starves workers beside other processes
            )
        except BaseException:
            self.close()
            raise
        finally:
            del os.environ[leftovers.MARK]

    def close(self) -> None:
        """Remove the processes and files that this embedded Ray leaves, and wait for that; call it after
        ray.shutdown()."""
        self._opened.close()
        assert self._leftovers.stdin
        self._leftovers.stdin.close()
        self._leftovers.wait()


@contextmanager
def _private(token: Path) -> Iterator[None]:
    """Restrict a Ray that is started inside the block to this machine and to processes that can read the file `token`,
    which this creates with a random secret. Ray's processes inherit the settings through the environment, which is
    restored after the block."""
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
    """Reset Ray's authentication mode and token in this process, which Ray reads only once, after a change of the
    environment variables that set them. The mode comes first: a thread of a Ray that is shutting down would otherwise
    look for a removed token and abort this process."""
    raylet: Any = import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def join_cluster() -> None:
    """Connect this process to the Ray cluster at RAY_ADDRESS or, if that is not set, to the one running on this
    machine; do nothing if it is connected already. Raises ConfigError if there is no such cluster."""
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        _knock(address)
        _init(address=address)
    except (OSError, RayError, ValueError, RuntimeError) as error:  # the last two: a bad address
        reason = str(error).strip().partition("\n")[0]
        constraint = f"no Ray cluster at RAY_ADDRESS={address} ({reason}); start one with `ray start --head`"
        raise ConfigError(violation("cluster", "ray", constraint, ["cluster=local"])) from None


def _knock(address: str) -> None:
    """Raise OSError if `address` of a Ray cluster is HOST:PORT and nothing listens there: Ray itself would retry for
    minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()


def free_resources() -> dict[str, float]:
    """Return the resources of the joined Ray cluster that are free now, by Ray's names: {"CPU": ..., "GPU": ...}."""
    import ray

    return ray.available_resources()


def accelerators() -> list[str]:
    """Return the accelerator types that the nodes of the joined Ray cluster report, such as H100 and A100-80G."""
    import ray

    return [name.partition(":")[2] for name in ray.cluster_resources() if name.startswith("accelerator_type:")]


def _init(**arguments: Any) -> None:
    """Start or join Ray by ray.init with `arguments`, quietly, so that its workers find this package and this process
    keeps its SIGTERM handler."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # `uv run` would rebuild the environment per worker
    import ray

    on_term = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, runtime_env=_runtime_env(), **arguments)
    finally:
        signal.signal(signal.SIGTERM, on_term)  # Ray replaces the handler
    _hush()


def _hush() -> None:
    """Stop Ray from printing pages in the driver about every process that dies, whatever `log_to_driver` says. Ray has
    no public way to turn this off; the journal records what matters."""
    import ray

    with suppress(AttributeError):  # another version of Ray: leave the messages
        worker: Any = ray._private.worker.global_worker
        worker.threads_stopped.set()
        worker.gcs_error_subscriber.close()


def _runtime_env() -> dict[str, Any] | None:
    """Return Ray's runtime environment (PYTHONPATH) with which its workers find this package, None if the package is
    installed and started by its own hook (_startup.py)."""
    if "_platform_startup" in sys.modules:
        return None
    root = str(Path(__file__).parents[4])
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}}


def _gpus() -> int:
    """Count the GPUs of this machine: an embedded Ray that is told of more would place workers on those that are not
    there."""
    import torch

    return torch.cuda.device_count()


def _short_temporary_directory() -> str:
    """Create a temporary directory for an embedded Ray, with a short path because of Ray's Unix sockets (at most 107
    characters)."""
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    return tempfile.mkdtemp(prefix="ray-")


class Notices:
    """Watches the joined Ray cluster for draining nodes. `nodes`: their Ray ids, kept current by a thread."""

    def __init__(self) -> None:
        self.nodes: frozenset[str] = frozenset()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread that queries Ray for draining nodes; call it before ray.shutdown(), so that Ray is not
        queried after it."""
        self._closed.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._closed.wait(_NOTICE_SECONDS):
            with suppress(Exception):  # if Ray does not answer this query, there is no notice
                self.nodes = _draining_nodes()


def _draining_nodes() -> frozenset[str]:
    """Return the Ray ids of the nodes that the joined cluster is about to take away (draining). Ray has no public
    function for this; Ray Train uses the same one."""
    import ray

    return frozenset(ray._private.state.state.get_draining_nodes())
