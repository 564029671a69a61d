"""Session with Ray: start an embedded one or join a cluster, and query free resources and draining nodes."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from platform.boundary.refusals import SHOWN, ConfigError, added_path, format_violation
from platform.boundary.terminal import escape_unprintable
from platform.cluster.crew import leftovers
from platform.cluster.crew.failures import NotThere
from platform.cluster.crew.job import gpu_count
from platform.config.groups import Cluster

_LOG = logging.getLogger("platform.cluster")
_ATTEMPTS = 3  # to start an embedded Ray
_NOTICE_SECONDS = 2.0  # interval of the queries for draining nodes
_SECRET = secrets.token_hex(32)  # of the embedded Ray of this process
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray uses the loopback address, as on those systems
_OBJECT_STORE_BYTES = 100 << 20  # small: no tensor goes through it, and workers need the shared memory


class EmbeddedRay:
    """Private Ray instance on this machine with room for `size` workers, but on `gpus` for no more than there are GPUs.
    It joins no other cluster, reports no usage statistics, and leaves no process or file behind when this process ends,
    however it ends. `directory`: folder of its files, and of others to be removed with it; only this user can read
    it."""

    def __init__(self, size: int, *, gpus: bool):
        """Start a private Ray on this machine; again, with all of its processes, where it has not come up in the time
        that it gives itself, as on a machine that is busy."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._start_ray(size, gpus)
            except Exception as error:
                if attempt == _ATTEMPTS or not _is_startup_timeout(error):
                    raise
                again = f"once more, {attempt + 1} of {_ATTEMPTS}"
                _LOG.warning("ray: it did not start in its own time (a busy machine?); %s", again)

    def _start_ray(self, size: int, gpus: bool) -> None:
        """Start a private Ray with room for `size` workers, its directory, and the process that cleans up after it.
        `gpus`: offer this machine's GPUs too."""
        self._opened = ExitStack()
        # readable by this user alone; Ray's own directory is open to all
        self.directory = directory = self._opened.enter_context(leftovers.MarkedPrograms()).directory
        _restrict_ray(directory)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ[leftovers.MARK] = directory
        try:
            _init_ray(
                build_runtime_env({}, {}, installed=_is_installed()),
                address="local",
                _temp_dir=f"{directory}/ray",
                _node_ip_address="127.0.0.1",
                num_cpus=size,  # logical CPUs, one per worker: more than cores is slow but allowed
                num_gpus=min(size, gpu_count()) if gpus else 0,  # with more, Ray would place workers on missing ones
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
        """Leave this embedded Ray, kill its processes (a graceful end takes over a second), remove its files; wait."""
        _shut_down_ray()
        self._opened.close()


def _is_startup_timeout(error: Exception) -> bool:
    """Return True if Ray gave up on processes of its own that were too slow, for which it has no exception type."""
    said = str(error).lower()
    return isinstance(error, TimeoutError) or any(words in said for words in ("timed out", "failed to start"))


def _shut_down_ray() -> None:
    """Detach this process from the Ray that it has started, if it is connected, and kill Ray's own processes."""
    import ray

    if not ray.is_initialized():
        return
    with suppress(AttributeError):  # another version of Ray: it ends in good order
        node: Any = ray._private.worker._global_node
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **how: kill(**{**how, "allow_graceful": False})
    ray.shutdown()


def _restrict_ray(directory: str) -> None:
    """Restrict the Ray that this process starts, which starts no other, to this machine and to processes that can read
    a file in `directory`, with a random secret. Ray's processes inherit the settings through the environment; Ray reads
    them and the secret once, so that a second attempt has the same."""
    token = Path(directory, "token")
    token.touch(0o600)
    token.write_text(_SECRET)
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), _CLUSTERS: "0"})


def join_cluster(cluster: Cluster) -> None:
    """Connect this process to the Ray cluster at RAY_ADDRESS or, if that is not set, to the one running on this
    machine, with the runtime environment that `cluster` asks for; do nothing if it is connected already. Raises
    ConfigError if there is no such cluster, or Ray refuses the environment."""
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "auto")
    job_environment = ray_job_config().get("runtime_env") or {}
    environment = build_runtime_env(cluster.runtime_env, job_environment, installed=_is_installed())
    try:
        ray.runtime_env.RuntimeEnv(**environment)
    except (TypeError, ValueError) as error:
        raise _environment_refusal(error) from None
    try:
        _init_ray(environment, address=address)
    except (OSError, RayError, ValueError, RuntimeError) as error:  # the last two: a bad address
        if cluster.runtime_env and re.search("runtime.?env|working_dir|py_modules", str(error)):
            raise _environment_refusal(error) from None
        raise cluster_refusal(address, str(error)) from None


def cluster_refusal(address: str, reason: str) -> ConfigError:
    """Return the refusal of a run that cannot join the Ray cluster at `address`, for all of a `reason` of Ray's; as
    NotThere unless they do not match, which no waiting cures."""
    reason = escape_unprintable(" ".join(reason.split())[: 2 * SHOWN])
    if "ersion mismatch" in reason:
        return ConfigError(
            "cluster", "ray", f"the Ray cluster at RAY_ADDRESS={address} is another version's ({reason})"
        )
    constraint = f"no Ray cluster at RAY_ADDRESS={address} ({reason}); start one with `ray start --head`"
    return NotThere(format_violation("cluster", "ray", constraint, ["cluster=local"]))


def _environment_refusal(error: Exception) -> ConfigError:
    """Return the ConfigError for a runtime environment that Ray has refused with `error`, without its values, which may
    be secrets."""
    reason = escape_unprintable(" ".join(str(error).split())[:SHOWN])
    return ConfigError(f"cluster.runtime_env: Ray refuses it: {reason}")


def free_resources(labels: Mapping[str, str]) -> dict[str, float]:
    """Return the resources of the joined Ray cluster that are free now, by Ray's names: {"CPU": ..., "GPU": ...}; at
    most the resources of the nodes that have the `labels`, as label selectors name them."""
    import ray

    free = ray.available_resources()
    if not labels:
        return free
    alive = (node for node in ray.nodes() if node["Alive"])
    fitting = [node["Resources"] for node in alive if matches_labels(labels, node.get("Labels", {}))]
    return {name: min(amount, sum(node.get(name, 0.0) for node in fitting)) for name, amount in free.items()}


def matches_labels(labels: Mapping[str, str], node_labels: Mapping[str, str]) -> bool:
    """Return True if Ray's label selectors choose a node with the labels `node_labels`: name -> value, !value,
    in(a,b) or !in(a,b), as Ray reads them.

    >>> matches_labels({"zone": "!in(a,b)", "gpu": "H100"}, {"zone": "c", "gpu": "H100"})
    True
    """
    for name, selector in labels.items():
        accepted = selector.removeprefix("!")
        listed = re.fullmatch(r"in\((.*)\)", accepted)
        values = [value.strip() for value in listed[1].split(",")] if listed else [accepted]
        if (node_labels.get(name) in values) == selector.startswith("!"):
            return False
    return True


def list_free_nodes(needs: Mapping[str, float]) -> list[tuple[dict[str, str], int]]:
    """Return the labels of every node of the joined Ray cluster, and how many times it has the resources `needs` free
    now; [] if this version of Ray cannot say: it has no public function for a node's free resources."""
    import ray

    try:
        free = ray._private.state.available_resources_per_node()
    except (AttributeError, ImportError):
        return []
    labels = {node["NodeID"]: dict(node["Labels"] or {}) for node in ray.nodes() if node["Alive"]}
    known = {node: amounts for node, amounts in free.items() if node in labels}
    rooms = {node: min(amounts.get(n, 0.0) // need for n, need in needs.items()) for node, amounts in known.items()}
    return [(labels[node], int(room)) for node, room in rooms.items()]


def list_accelerators() -> list[str]:
    """Return the accelerator types that the nodes of the joined Ray cluster report, such as H100 and A100-80G."""
    import ray

    return [name.partition(":")[2] for name in ray.cluster_resources() if name.startswith("accelerator_type:")]


def _init_ray(environment: Mapping[str, Any], **arguments: Any) -> None:
    """Start or join Ray by ray.init with `arguments` and the runtime environment `environment`, so that this process
    keeps its SIGTERM handler."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # `uv run` would rebuild the environment per worker
    import ray

    on_term = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, runtime_env=dict(environment) or None, **arguments)
    finally:
        signal.signal(signal.SIGTERM, on_term)  # Ray replaces the handler


def build_runtime_env(asked: Mapping[str, Any], job: Mapping[str, Any], *, installed: bool) -> dict[str, Any]:
    """Return the runtime environment that this process asks Ray for: `asked`, from cluster.runtime_env, and where this
    package is not `installed` a PYTHONPATH by which the workers find it. `job`: the one of the Ray job that this
    process is the entry point of, if any (`ray job submit`), which its workers get anyhow; if it brings code, as by
    --working-dir, they find the package there. Raises ConfigError where both say the same thing, as Ray would."""
    environment = dict(asked)
    variables, of_job = dict(asked.get("env_vars", {})), job.get("env_vars", {})
    both = {f"env_vars.{name}" for name in variables.keys() & of_job.keys()}
    both |= asked.keys() & job.keys() - {"env_vars"}
    if both and os.environ.get("RAY_OVERRIDE_JOB_RUNTIME_ENV") != "1":
        reason = "the Ray job has one of its own; leave one out, or set RAY_OVERRIDE_JOB_RUNTIME_ENV=1"
        raise ConfigError([format_violation(f"cluster.runtime_env.{name}", "...", reason) for name in sorted(both)])
    if not (installed or "PYTHONPATH" in of_job or job.keys() & {"working_dir", "py_modules"}):
        root = added_path() or str(Path(__file__).parents[3])
        python_path = variables.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, python_path]))
    return environment | ({"env_vars": variables} if variables else {})


def ray_job_config(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the configuration of the Ray job whose entry point has this environment; {} if there is none."""
    with suppress(ValueError):
        return dict(json.loads(environment.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")))
    return {}


def _is_installed() -> bool:
    """Return True if this package is installed, with its hook (_startup.py), so that Ray's workers find it."""
    return "_platform_startup" in sys.modules


class DrainWatcher:
    """Watches the joined Ray cluster for draining nodes, in a thread."""

    def __init__(self, send: Callable[[frozenset[str]], None]) -> None:
        """Start the thread that watches the joined Ray cluster; `send`: sends the Ray ids of draining nodes, when they
        change."""
        self._send = send
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll_nodes, name="notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread that queries Ray for draining nodes, unless Ray holds it up; call it before
        ray.shutdown()."""
        self._closed.set()
        self._thread.join(_NOTICE_SECONDS)

    def _poll_nodes(self) -> None:
        """Look for the Ray cluster's draining nodes every _NOTICE_SECONDS until `close`, if Ray answers."""
        known, dead = frozenset[str](), frozenset(_dead_nodes())
        while not self._closed.wait(_NOTICE_SECONDS):
            for node, text in _dead_nodes().items():
                if node not in dead:
                    _LOG.info("Ray: node %s", text)
                    dead |= {node}
            if (nodes := _draining_nodes()) is not None and nodes != known:
                self._send(known := nodes)


def _dead_nodes() -> dict[str, str]:
    """Return a line on each node of the joined Ray cluster that Ray knows to be dead, by Ray id; {} if Ray does not
    answer."""
    import ray

    lines = {}
    with suppress(Exception):
        for node in ray.nodes():
            if not node["Alive"]:
                why = " ".join(str(node.get("DeathReasonMessage", "")).split())[:SHOWN]
                lines[node["NodeID"]] = f"{node['NodeID'][:8]} at {node['NodeManagerAddress']} is dead: {why}"
    return lines


def _draining_nodes() -> frozenset[str] | None:
    """Return the Ray ids of the nodes that the joined cluster is about to take away (draining), None if Ray does not
    answer. It has no public function for this; Ray Train uses the same one."""
    import ray

    try:
        return frozenset(ray._private.state.state.get_draining_nodes())
    except Exception:  # it does not answer, or another version has none: there is no notice
        return None
