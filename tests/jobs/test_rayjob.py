import copy
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCHEMA = yaml.safe_load((Path(__file__).parent / "rayjob.schema.yaml").read_text())
CLAIM, JOB = yaml.safe_load_all((ROOT / "jobs" / "kubernetes" / "rayjob.yaml").read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]
[WORKERS] = CLUSTER["workerGroupSpecs"]
PODS = [group["template"]["spec"] for group in (CLUSTER["headGroupSpec"], WORKERS)]


def test_the_job_has_kuberay_s_fields_and_types() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(JOB, SCHEMA)


@pytest.mark.parametrize(
    "damage",
    [
        lambda job: job["spec"].update(entryPoint=job["spec"].pop("entrypoint")),
        lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].update(minReplica=1),
        lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-gpus": 0}),
        lambda job: job["spec"].update(backoffLimit="10"),
        lambda job: job.update(apiVersion="ray.io/v1alpha1"),
        lambda job: job["spec"]["rayClusterSpec"].update(rayVersion=2.6),
    ],
    ids=["misspelt field", "misspelt nested field", "number for a string", "string for a number", "old API", "version"],
)
def test_the_check_sees_usual_mistakes(damage: Callable[[dict[str, Any]], None]) -> None:
    job = copy.deepcopy(JOB)
    damage(job)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, SCHEMA)


def test_the_entrypoint_composes_and_fills_the_pods() -> None:
    from platform.launch import compose

    command = shlex.split(JOB["spec"]["entrypoint"])
    assert command[:3] == ["python", "-m", "platform.launch"]
    config = compose(command[3:])
    assert config.cluster.kind == "ray" and config.cluster.wait > 0
    world = config.parallel.data * math.prod(config.tensor.axes.values()) * config.pipeline.stages
    gpus = int(PODS[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert world + config.elastic.spares == WORKERS["replicas"] * gpus
    assert config.elastic.spares == gpus  # a whole pod
    assert math.prod(config.tensor.axes.values()) == gpus  # tensor parallelism stays inside a pod


def test_ray_asks_for_a_token() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}


def test_a_retry_finds_the_run() -> None:
    """The run directory is named (not hashed or drawn) and lies on the claim, which every pod mounts."""
    [run_dir] = [word.split("=")[1] for word in shlex.split(JOB["spec"]["entrypoint"]) if word.startswith("run.dir=")]
    assert JOB["spec"]["backoffLimit"] > 0 and JOB["spec"]["submitterConfig"]["backoffLimit"] == 0
    assert CLAIM["kind"] == "PersistentVolumeClaim" and CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in PODS:
        claims = {
            v["name"]: v["persistentVolumeClaim"]["claimName"]
            for v in pod["volumes"]
            if len(v) == 2 and "persistentVolumeClaim" in v
        }
        mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
        assert mounts.keys() == {v["name"] for v in pod["volumes"]}
        assert [mounts[name] for name, claim in claims.items() if claim == CLAIM["metadata"]["name"]] == [
            str(Path(run_dir).parent)
        ]


def test_pods_are_guaranteed_and_fit_the_job() -> None:
    for pod in PODS:
        [container] = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert f":{CLUSTER['rayVersion']}-" in rayjob_comment_on(container["image"])
        [drain] = [e["value"] for e in container["env"] if e["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
        assert pod["terminationGracePeriodSeconds"] >= float(drain) + 30 >= 90
    assert CLUSTER["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert PODS[1]["restartPolicy"] == "Never"
    assert WORKERS["minReplicas"] <= WORKERS["replicas"] <= WORKERS["maxReplicas"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in PODS[1]["containers"][0]["volumeMounts"]


def rayjob_comment_on(image: str) -> str:
    """What the first line with this image says it is built from."""
    lines = (ROOT / "jobs" / "kubernetes" / "rayjob.yaml").read_text().splitlines()
    return next(line for line in lines if f"image: {image}" in line).partition("#")[2]
