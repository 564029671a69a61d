"""Ray clusters of several nodes on this machine, which are lost, told to go and added like a cloud's machines."""

import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def private_cluster(head_cpus, head=None, **environment):
    """`ray.cluster_utils.Cluster` with its head, which gets the arguments `head` too; RAY_ADDRESS is its address,
    `environment` that of its workers."""
    from ray.cluster_utils import Cluster

    known = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # a lost node is known as such within seconds, not half a minute
        "RAY_health_check_period_ms": "500",
    }
    (Path(tempfile.gettempdir()) / "ray").mkdir(exist_ok=True)  # it writes its address there, whatever its own folder
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray") as folder:  # a short name
        for name, value in {**known, **environment}.items():
            patch.setenv(name, value)
        head = {"num_cpus": head_cpus, "include_dashboard": False, "temp_dir": folder} | (head or {})
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.shutdown()


def drain(cluster, node):
    """Tells Ray that the node will be taken away, as a cloud's notice does."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int((time.time() + 600) * 1000)
    assert GcsClient(address=cluster.address).drain_node(node.node_id, reason, "a test", deadline) == (True, "")
