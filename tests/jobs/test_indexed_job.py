"""The manifest of a job without Ray: an Indexed Job as Kubernetes has it, whose pods find the run and each other."""

import copy
import gzip
import json
from pathlib import Path

import jsonschema
import pytest

from platform.boundary.refusals import ConfigError
from platform.jobs.__main__ import main
from platform.jobs.kubernetes import render_kubernetes_job
from platform.launch import compose_config
from tests.harness.indexed_job import IndexedJob
from tests.jobs.examples import JOBS
from tests.jobs.test_kubernetes import CHECK, POD, WITHOUT_RAY, documents

RELEASES = [  # of Kubernetes: Job and Service as its own definitions have them
    jsonschema.Draft202012Validator(json.loads(gzip.decompress(path.read_bytes())))
    for path in sorted((Path(__file__).parent / "crds").glob("kubernetes-*.json.gz"))
]
TORCHRUN = [*POD, "job.launcher=torchrun"]


def parts(text):
    by_kind = {document["kind"]: document for document in documents(text)}
    assert by_kind.keys() == {"Service", "NetworkPolicy", "Job"}
    return by_kind["Job"], by_kind["Service"], by_kind["NetworkPolicy"]


def example():
    return parts((JOBS / WITHOUT_RAY).read_text())


@pytest.mark.parametrize("release", range(2))
def test_kubernetes_own_definitions_take_it(release):
    job, service, _ = example()
    RELEASES[release].validate(job)
    RELEASES[release].validate(service)


DAMAGE = {
    "misspelt field": lambda spec: spec.update(completionmode=spec.pop("completionMode")),
    "string for a number": lambda spec: spec.update(backoffLimit="10"),
    "rule without an action": lambda spec: spec["podFailurePolicy"]["rules"][0].pop("action"),
    "misspelt rule": lambda spec: spec["podFailurePolicy"]["rules"][1].update(onExitCode={}),
    "number for a string": lambda spec: spec["template"]["spec"]["containers"][0]["env"][0].update(value=1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_checks_see_usual_mistakes(damage):
    job = copy.deepcopy(example()[0])
    DAMAGE[damage](job["spec"])
    for checker in (*RELEASES, CHECK):
        with pytest.raises(jsonschema.ValidationError):
            checker.validate(job)


def test_the_pods_are_one_per_node_of_the_plan_and_find_each_other():
    job, service, policy = example()
    spec, pod = job["spec"], job["spec"]["template"]
    indexed = IndexedJob(job, Path("/tmp"))
    words = indexed.command(1)
    config = compose_config(words[words.index("--run") + 1 :])
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 2
    workers = int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert config.parallel.data == spec["completions"] * workers == 16
    assert {"--index=1", "--pods=2", f"--workers={workers}", "--address=127.0.0.1"} <= {*words}
    assert words[:5] == [
        "python",
        "-m",
        "platform.jobs",
        "pod",
        f"{config.run.dir}/pods/{indexed.variables(1)['JOB_UID']}",
    ]
    for selector in (service["spec"]["selector"], policy["spec"]["podSelector"]["matchLabels"]):
        assert selector.items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None" and pod["spec"]["subdomain"] == service["metadata"]["name"]


def test_a_pod_that_is_taken_away_costs_nothing_and_what_no_other_pod_would_change_ends_the_job():
    job, *_ = example()
    indexed = IndexedJob(job, Path("/tmp"))
    assert [indexed._rule(1, status) for status in (1, 2, 75, 137, 143)] == ["FailJob"] * 3 + ["Count"] * 2
    indexed.disrupted.add(1)
    assert [indexed._rule(1, status) for status in (75, 137, 143)] == ["Ignore"] * 3
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and job["spec"]["backoffLimit"] >= 10
    drain = int(next(word for word in indexed.command(0) if word.startswith("--drain=")).partition("=")[2])
    margin = compose_config(indexed.command(0)[indexed.command(0).index("--run") + 1 :]).run.time_margin
    assert pod["terminationGracePeriodSeconds"] >= drain + 30 and drain >= margin


def test_no_word_is_changed_on_its_way():
    """Kubernetes would fill in $(NAME), and take one $ of two."""
    for word in ("model.vocab=${oc.decode:'50257'}", "run.dir='/shared/$(JOB_UID)$$x'"):
        job, *_ = parts(render_kubernetes_job([*TORCHRUN, word]))
        assert word in IndexedJob(job, Path("/tmp")).command(0)


def test_options():
    more = (
        "job.topology=example.com/rack job.pull_secrets=[mine] job.owner=0a1b2c3d job.time=2:00:00 job.secrets=[A=b/c]"
    )
    job, service, policy = parts(render_kubernetes_job([*TORCHRUN, *more.split(), "monitor=wandb", "job.retries=3"]))
    pod = job["spec"]["template"]["spec"]
    for document in (job, service, policy):
        CHECK.validate(document)
    for document in (service, policy):
        [owner] = document["metadata"]["ownerReferences"]
        assert (owner["apiVersion"], owner["kind"], owner["uid"]) == ("batch/v1", "Job", "0a1b2c3d")
    assert {"A", "WANDB_API_KEY"} <= {variable["name"] for variable in pod["containers"][0]["env"]}
    assert {"--time-limit=7200", "--retries=3"} <= {*pod["containers"][0]["args"]}
    assert pod["imagePullSecrets"] == [{"name": "mine"}] and "podAffinity" in pod["affinity"]


@pytest.mark.parametrize(
    "typed, line",
    [
        (["job.wait=1:00:00"], r"job\.wait=1:00:00: is for job\.launcher=ray; nearest legal: job\.wait="),
        (["job.head_select=[a=b]"], r"job\.head_select=.*: is for job\.launcher=ray"),
        (
            ["cluster=local", "elastic.spares=1"],
            r"elastic\.spares=1: torchrun starts the plan's workers and no others",
        ),
        (["parallel.data=6", "train.global_batch=12", "job.workers=4"], r"job\.workers=4: torchrun starts as many"),
        (["job.launcher=mpi"], r"job\.launcher=mpi"),
    ],
)
def test_what_torchrun_cannot_have_is_refused(typed, line):
    with pytest.raises(ConfigError, match=line):
        render_kubernetes_job([*TORCHRUN, *typed])


def test_the_command_line_of_a_pod(capsys):
    with pytest.raises(SystemExit):
        main(["pod", "/tmp/x", "--index=0", "--pods=2", "--workers=1", "--first=a"])
    assert "--address" in capsys.readouterr().err
