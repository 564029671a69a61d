"""What a plan asks of a cluster."""

import pytest
import yaml

from platform.jobs.job_options import JobOptions
from platform.jobs.planned_run import GIB, compute_job_size
from platform.launch import compose_config
from platform.predict.make_plan import make_plan
from tests.jobs.examples import JOBS


def sized(*arguments, **options):
    config = compose_config(arguments)
    return compute_job_size(config, make_plan(config), JobOptions(**options))


def test_the_flagship():
    """As jobs/kubernetes/gpt175b/job.yaml has it, which test_kubernetes.py writes again."""
    jobs = [d for d in yaml.safe_load_all((JOBS / "kubernetes/gpt175b/job.yaml").read_text()) if d["kind"] == "RayJob"]
    [workers] = jobs[0]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (8, 16 + 1)
    pod = workers["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    each = 175e9 * 12 / 128  # bytes of state, of which a worker holds two snapshots, two of a peer's, and writes one
    assert 1.1 * 5 * each * 8 < int(limits["memory"].removesuffix("Gi")) * GIB < 1.4 * 5 * each * 8
    assert limits["nvidia.com/gpu"] == "8"
    assert pod["terminationGracePeriodSeconds"] > 2 * 175e9 * 12 / 16 / 0.5e9  # time to write it, twice over


@pytest.mark.parametrize(
    "arguments, options, expected",  # workers of a node, nodes, spares, least
    [
        (["+experiment=one_gpu"], {}, (1, 1, 0, 1)),
        (["+experiment=gpt_quick"], {}, (4, 1, 0, 1)),
        (["+experiment=gpt_quick"], {"workers": 1}, (1, 4, 0, 2)),
        (["+experiment=gpt_quick", "elastic.min_workers=3"], {"workers": 2}, (2, 2, 0, 2)),
        (["+experiment=gpt_quick", "elastic.min_workers=1"], {"workers": 2}, (2, 2, 0, 1)),
        (["+experiment=gpt_quick", "elastic.max_workers=12"], {"workers": 2}, (2, 2, 4, 1)),
        (["+experiment=gpt_quick", "elastic.spares=1"], {"workers": 4}, (4, 1, 1, 1)),
        (["+experiment=cluster_check", "parallel.data=16"], {}, (8, 2, 0, 2)),
    ],
)
def test_nodes(arguments, options, expected):
    size = sized(*arguments, **options)
    assert (size.workers, size.nodes, size.spares, size.least) == expected


def test_memory_without_snapshots_and_as_given():
    one = ["+experiment=one_gpu", "model=gpt3_2_7b"]
    plain, without = sized(*one), sized(*one, "elastic.snapshot_every=0")
    assert plain.memory - without.memory == pytest.approx(1.1 * 4 * plain.state, abs=GIB)
    stated = sized(*one, memory=900, cpus=90)
    assert (stated.memory, stated.cpus) == (900 * GIB, 90)


def test_a_worker_on_cpus_needs_its_device_s_memory_of_the_host():
    small, large = sized("+experiment=gpt_quick"), sized("+experiment=gpt_quick", "model=gpt3_350m")
    assert large.memory > 4 * 5e9 and small.cpus == 4


def test_activations_in_host_memory_are_a_node_s_too():
    one = ["+experiment=one_gpu", "recompute=full", "train.microbatch=32"]
    less, more = sized(*one, workers=1), sized(*one, "recompute_offload=true", workers=1)
    kept = 32 * 1024 * 768 * 2 * 12  # stream of 12 blocks, in 16 bits
    assert more.memory - less.memory == pytest.approx(1.1 * kept, abs=GIB)
