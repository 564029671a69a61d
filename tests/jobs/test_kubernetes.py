"""Manifests for Kubernetes: KubeRay's fields and types, pods that hold the plan, a run that a retry finds."""

import copy
import gzip
import json
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from platform.boundary.refusals import ConfigError
from platform.jobs.__main__ import main
from platform.jobs.kubernetes import render_kubernetes_job
from platform.launch import compose_config
from tests.jobs.examples import CLAIM, EXAMPLES, JOBS, written, written_claim

SCHEMA = yaml.safe_load((Path(__file__).parent / "kubernetes.schema.yaml").read_text())
CHECK = jsonschema.Draft202012Validator(SCHEMA)
RELEASES = [  # of KubeRay: RayJob as its own CRD has it
    jsonschema.Draft202012Validator(json.loads(gzip.decompress(path.read_bytes())))
    for path in sorted((Path(__file__).parent / "crds").glob("kuberay-*.json.gz"))
]
JOB_OWNER = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": "one-gpu"}
WITHOUT_RAY = "kubernetes/torchrun/job.yaml"  # tests/jobs/test_indexed_job.py has more on it
MANIFESTS = [name for name in EXAMPLES if name.startswith("kubernetes/") and name != WITHOUT_RAY]
OVERLAYS = sorted(path.parent for path in (JOBS / "kubernetes").rglob("kustomization.yaml"))
POD = "+experiment=one_gpu data=text data.path=/shared/a checkpoint.url=/shared/b job.image=i job.claim=c".split()


def documents(text):
    return [document for document in yaml.safe_load_all(text) if document]


def rayjob(text):
    [job] = [document for document in documents(text) if document["kind"] == "RayJob"]
    return job


def job_of(name):
    return rayjob((JOBS / name).read_text())


def cluster_of(job):
    cluster = job["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    return cluster, workers


def pods(job):
    """The pods that train: the head's, the workers'."""
    cluster, workers = cluster_of(job)
    return [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]


def arguments(job):
    """Options of the supervisor, and the arguments of the launcher."""
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:4] == ["python", "-m", "platform.jobs", "supervise"]
    first = next(i for i, word in enumerate(words) if i > 3 and not word.startswith("--"))
    return words[4:first], words[first:]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * ("gpt175b" in name)) for name in [*MANIFESTS, WITHOUT_RAY]]
)
def test_the_examples_are_what_their_commands_write(name):
    assert (JOBS / name).read_text() == written(name), "python -m tests.jobs.examples writes them"


def test_no_file_that_is_deleted_with_a_job_has_its_claim(tmp_path, capsys):
    """`kubectl delete -f job.yaml`, the inverse of the documented `apply`, leaves data and checkpoints alone."""
    assert (JOBS / CLAIM).read_text() == written_claim(), "python -m tests.jobs.examples writes it"
    command = ["kubernetes", *POD, "job.storage=2Ti", "job.storage_class=fast"]
    assert main(command) == 2
    assert "job.storage=2Ti: the claim is written to a file of its own" in capsys.readouterr().err
    assert main([*command, "--output", str(tmp_path / "job.yaml")]) == 0
    claimed, wrote = capsys.readouterr().out.splitlines()
    assert "claim-c.yaml" in claimed and re.fullmatch(
        rf"wrote ({tmp_path}/job.yaml): .*\d nodes? of .*; submit it: kubectl apply -f \1", wrote
    )
    kinds = [document["kind"] for document in documents((tmp_path / "job.yaml").read_text())]
    assert "PersistentVolumeClaim" not in kinds
    [claim] = documents((tmp_path / "claim-c.yaml").read_text())
    CHECK.validate(claim)
    assert claim["metadata"]["name"] == "c" and claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"] == {"storage": "2Ti"}
    for folder in OVERLAYS:
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        assert not any("claim-" in name for name in listed)


def test_every_file_has_the_fields_and_types_of_its_kind():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    paths = [path for path in (JOBS / "kubernetes").rglob("*.yaml") if path.name != "kustomization.yaml"]
    assert len(paths) >= 7
    for path in paths:
        for document in documents(path.read_text()):
            CHECK.validate(document)


def path_to(job, *keys):
    for key in keys:
        job = job[key]
    return job


CLUSTER = ("spec", "rayClusterSpec")
WORKERS = (*CLUSTER, "workerGroupSpecs", 0)
PODS = (*WORKERS, "template", "spec")
DAMAGE = {
    "misspelt field": lambda job: job["spec"].update(entryPoint=job["spec"].pop("entrypoint")),
    "misspelt nested field": lambda job: path_to(job, *WORKERS).update(minReplica=1),
    "number for a string": lambda job: path_to(job, *WORKERS, "rayStartParams").update({"num-gpus": 0}),
    "string for a number": lambda job: job["spec"].update(backoffLimit="10"),
    "old API": lambda job: job.update(apiVersion="ray.io/v1alpha1"),
    "version": lambda job: path_to(job, *CLUSTER).update(rayVersion=2.6),
    "no autoscaler": lambda job: path_to(job, *CLUSTER, "autoscalerOptions").update(version="v3"),
    "number of GPUs": lambda job: path_to(job, *PODS, "containers", 0, "resources", "limits").update({"x/gpu": 8}),
    "misspelt security": lambda job: path_to(job, *PODS, "securityContext").update(fsgroup=1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_check_sees_usual_mistakes(damage):
    job = copy.deepcopy(job_of("kubernetes/gpt175b/job.yaml"))
    CHECK.validate(job)
    DAMAGE[damage](job)
    with pytest.raises(jsonschema.ValidationError):
        CHECK.validate(job)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_entrypoint_composes_and_fills_the_pods(name):
    job = job_of(name)
    told, words = arguments(job)
    config, (_, workers) = compose_config(words), cluster_of(job)
    limits = pods(job)[1]["containers"][0]["resources"]["limits"]
    size = int(limits.get("nvidia.com/gpu", limits["cpu"]))
    world = config.parallel.data * math.prod(config.tensor.axes.values()) * config.pipeline.stages
    assert config.cluster.kind == "ray" and config.cluster.wait > 0
    assert workers["maxReplicas"] == -(-world // size) + -(-config.elastic.spares // size)
    least = config.elastic.min_workers or world
    assert workers["replicas"] == workers["minReplicas"] == -(-least // size)
    assert f"--retries={job['spec']['backoffLimit']}" in told
    for axis in config.tensor.axes.values():  # tensor parallelism stays inside a pod
        assert size % axis == 0


def test_a_large_job_starts_with_fewer_nodes_and_asks_for_more():
    cluster, workers = cluster_of(job_of("kubernetes/gpt175b/job.yaml"))
    assert workers["minReplicas"] < workers["maxReplicas"] and cluster["enableInTreeAutoscaling"]
    assert cluster["autoscalerOptions"]["version"] == "v2"
    config = compose_config(arguments(job_of("kubernetes/gpt175b/job.yaml"))[1])
    assert config.cluster.autoscale and config.cluster.device == "cuda"  # the run asks for the others
    check, workers = cluster_of(job_of("kubernetes/kind/job.yaml"))
    assert workers["minReplicas"] == workers["maxReplicas"] == 2 and not check["enableInTreeAutoscaling"]
    assert not compose_config(arguments(job_of("kubernetes/kind/job.yaml"))[1]).cluster.autoscale


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_retry_finds_the_run(name):
    """The run directory is named (not hashed or drawn) and lies on the claim, which every pod mounts."""
    job = job_of(name)
    config = compose_config(arguments(job)[1])
    assert job["spec"]["backoffLimit"] > 0
    assert job["spec"]["submitterConfig"]["backoffLimit"] >= 2  # one is evicted: the next follows the same Ray job
    for pod in pods(job):
        claims = {v["name"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
        [mount] = [m["mountPath"] for m in pod["containers"][0]["volumeMounts"] if m["name"] in claims]
        for path in (config.run.dir, config.checkpoint.url, config.data.cache, config.data.path or f"{mount}/x"):
            assert path.startswith(f"{mount}/")


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_are_guaranteed_private_and_have_time_to_save(name):
    job = job_of(name)
    cluster, _ = cluster_of(job)
    margin = compose_config(arguments(job)[1]).run.time_margin
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"].items() >= {("num-cpus", "0"), ("num-gpus", "0")}
    for pod in [*pods(job), job["spec"]["submitterPodTemplate"]["spec"]]:
        [container] = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert "ephemeral-storage" in container["resources"]["limits"]
        assert pod["securityContext"]["runAsUser"] == 1000 and pod["restartPolicy"] == "Never"
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
    for pod in pods(job):
        [drain] = [e["value"] for e in pod["containers"][0]["env"] if e["name"].endswith("DRAIN_TIMEOUT_S")]
        assert pod["terminationGracePeriodSeconds"] >= float(drain) + 30 >= 90 and float(drain) >= margin
        assert pod["securityContext"]["fsGroup"] == 1000
    shm = [v["emptyDir"] for v in pods(job)[1]["volumes"] if v["name"] == "shm"]
    assert (
        shm[0]["medium"] == "Memory"
        and {"name": "shm", "mountPath": "/dev/shm"} in (pods(job)[1]["containers"][0]["volumeMounts"])
    )


@pytest.mark.parametrize("name", MANIFESTS)
def test_what_protects_the_job_selects_its_pods(name):
    manifests = documents((JOBS / name).read_text())
    job = next(document for document in manifests if document["kind"] == "RayJob")
    cluster, workers = cluster_of(job)
    labels = [group["template"]["metadata"]["labels"] for group in (cluster["headGroupSpec"], workers)]
    labels.append(job["spec"]["submitterPodTemplate"]["metadata"]["labels"])
    [policy] = [document for document in manifests if document["kind"] == "NetworkPolicy"]
    assert all(policy["spec"]["podSelector"]["matchLabels"].items() <= own.items() for own in labels)
    budgets = [document["spec"] for document in manifests if document["kind"] == "PodDisruptionBudget"]
    selected = [[b["selector"]["matchLabels"].items() <= own.items() for own in labels] for b in budgets]
    assert sorted(selected) == [[False, False, True], [False, True, False], [True, False, False]]
    assert {b["minAvailable"] for b in budgets} == {1, workers["minReplicas"]}


def test_a_time_limit_drains_before_anybody_kills():
    plain, limited = rayjob(render_kubernetes_job(POD)), rayjob(render_kubernetes_job([*POD, "job.time=2:00:00"]))
    assert "activeDeadlineSeconds" not in plain["spec"] and not any("limit" in word for word in arguments(plain)[0])
    assert "--time-limit=7200" in arguments(limited)[0]
    assert "activeDeadlineSeconds" not in limited["spec"]  # which counts a queue too, however long it is
    both = rayjob(render_kubernetes_job([*POD, "job.time=2:00:00", "job.wait=1:00:00"]))
    assert both["spec"]["activeDeadlineSeconds"] > 7200 + 3600


def test_waiting_for_nodes_is_for_ever_unless_a_key_says_otherwise():
    """A deadline that is over costs a retry, and the place in the queue."""
    assert "preRunningDeadlineSeconds" not in rayjob(render_kubernetes_job(POD))["spec"]
    assert rayjob(render_kubernetes_job([*POD, "job.wait=1:00:00"]))["spec"]["preRunningDeadlineSeconds"] == 3600
    with pytest.raises(ConfigError, match=r"job\.wait=soon: must be H:MM:SS"):
        render_kubernetes_job([*POD, "job.wait=soon"])


def test_every_container_is_confined():
    """As PodSecurity's level `restricted` asks, the autoscaler's too, which KubeRay adds to the head's pod."""
    job = job_of("kubernetes/gpt175b/job.yaml")
    confined = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert cluster_of(job)[0]["autoscalerOptions"]["securityContext"] == confined
    for pod in [*pods(job), job["spec"]["submitterPodTemplate"]["spec"]]:
        containers = [*pod["containers"], *pod.get("initContainers", [])]
        assert all(container["securityContext"] == confined for container in containers)


def test_who_asks_kubernetes_is_the_autoscaler_alone():
    """No other pod has the token of a service account."""
    for name, head in (("gpt175b", True), ("one_gpu", False)):
        job = job_of(f"kubernetes/{name}/job.yaml")
        told = [pod["automountServiceAccountToken"] for pod in pods(job)]
        assert told == [head, False]
        assert job["spec"]["submitterPodTemplate"]["spec"]["automountServiceAccountToken"] is False


def test_where_pods_go_and_who_they_are():
    more = "job.head_select=[pool=system] job.head_tolerate=[system=true] job.topology=example.com/rack"
    more += " job.pull_secrets=[mine,other] job.service_account=trainer job.owner=0a1b2c3d-0000-4000-8000-000000000001"
    text = render_kubernetes_job([*POD, *more.split()])
    for document in documents(text):
        CHECK.validate(document)
        if document["kind"] != "RayJob":
            [owner] = document["metadata"]["ownerReferences"]
            assert owner == {**JOB_OWNER, "uid": "0a1b2c3d-0000-4000-8000-000000000001"}
    job = rayjob(text)
    (head, worker), submitter = pods(job), job["spec"]["submitterPodTemplate"]["spec"]
    for pod in (head, submitter):
        assert pod["nodeSelector"] == {"pool": "system"}
        assert pod["tolerations"] == [{"key": "system", "operator": "Equal", "value": "true"}]
    for pod in (head, submitter, worker):
        assert pod["imagePullSecrets"] == [{"name": "mine"}, {"name": "other"}]
        assert pod["serviceAccountName"] == "trainer"
    assert "nodeSelector" not in worker
    [wish] = worker["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wish["podAffinityTerm"]["topologyKey"] == "example.com/rack"
    labels = cluster_of(job)[1]["template"]["metadata"]["labels"]
    assert wish["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items()
    for release in RELEASES:
        release.validate(job)


@pytest.mark.parametrize("name", MANIFESTS)
def test_ray_s_logs_are_kept_when_a_pod_ends(name):
    """Beside Ray in every pod of it, until Ray has ended: what copies the end of its logs to the run directory."""
    job = job_of(name)
    run_dir = compose_config(arguments(job)[1]).run.dir
    for pod in pods(job):
        [keeper] = pod["initContainers"]
        assert keeper["restartPolicy"] == "Always"  # of Kubernetes 1.29: it ends when the others have
        assert keeper["command"] == ["python", "-m", "platform.jobs", "keep", run_dir]
        mounts = [{m["name"]: m["mountPath"] for m in c["volumeMounts"]} for c in (keeper, *pod["containers"])]
        assert all(m["ray"] == "/tmp/ray" and run_dir.startswith(m["shared"]) for m in mounts)
        assert {"name": "ray", "emptyDir": {}} in pod["volumes"]
        assert keeper["resources"]["requests"] == keeper["resources"]["limits"]


def test_what_is_typed_for_one_job_s_pods_names_the_job():
    """A role alone selects the pods of every job in the namespace."""
    pages = [*(JOBS.parent / "docs").glob("*.md"), *JOBS.parent.glob("*.md"), *JOBS.rglob("*.*")]
    selectors = [s for page in pages for s in re.findall(r"(?:-l|--selector)[ =](\S+?/\S+)", page.read_text())]
    assert selectors and all("elastic-platform/job=" in selector for selector in selectors)


@pytest.mark.parametrize("release", range(2))
@pytest.mark.parametrize("name", MANIFESTS)
def test_kuberay_s_own_definitions_take_every_example(name, release):
    RELEASES[release].validate(job_of(name))


@pytest.mark.parametrize("release", range(2))
@pytest.mark.parametrize("damage", [*DAMAGE][:4])
def test_kuberay_s_own_definitions_see_mistakes(damage, release):
    job = copy.deepcopy(job_of("kubernetes/gpt175b/job.yaml"))
    DAMAGE[damage](job)
    with pytest.raises(jsonschema.ValidationError):
        RELEASES[release].validate(job)


def test_options():
    more = "job.priority=high job.select=gpu=h100 job.tolerate=[pool=ml,x]"
    more += " job.user=7 job.interface=ens5 job.cpus=6 job.memory=48 job.retries=2"
    text = render_kubernetes_job([*POD, *more.split()])
    for document in documents(text):
        CHECK.validate(document)
    job = rayjob(text)
    pod = pods(job)[1]
    assert pod["nodeSelector"] == {"gpu": "h100"} and pod["priorityClassName"] == "high"
    assert [t["key"] for t in pod["tolerations"]] == ["nvidia.com/gpu", "pool", "x"]
    assert pod["securityContext"]["runAsUser"] == 7 and job["spec"]["backoffLimit"] == 2
    limits = pod["containers"][0]["resources"]["limits"]
    assert (limits["cpu"], limits["memory"], limits["nvidia.com/gpu"]) == ("6", "48Gi", "1")
    assert variables(pod)["NCCL_SOCKET_IFNAME"] == variables(pod)["GLOO_SOCKET_IFNAME"] == {"value": "ens5"}


def variables(pod):
    return {e["name"]: {k: v for k, v in e.items() if k != "name"} for e in pod["containers"][0]["env"]}


def test_wandb_s_key_is_a_secret_of_the_cluster_s():
    head, _ = pods(rayjob(render_kubernetes_job([*POD, "monitor=wandb"])))
    secret = {"name": "wandb", "key": "api-key", "optional": True}
    assert variables(head)["WANDB_API_KEY"] == {"valueFrom": {"secretKeyRef": secret}}
    assert "WANDB_API_KEY" not in variables(pods(rayjob(render_kubernetes_job(POD)))[0])


def test_other_services_addresses_and_tokens_are_secrets_too_and_never_values(monkeypatch):
    names = ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "TRACKIO_SPACE_ID", "HF_TOKEN")
    for name in names:
        monkeypatch.setenv(name, "0123456789abcdef" * 3)
    text = render_kubernetes_job([*POD, "monitor=[wandb,mlflow,trackio]", "job.secrets=[HF_TOKEN=mine/hub]"])
    environment = variables(pods(rayjob(text))[0])
    secrets = {name: environment[name]["valueFrom"]["secretKeyRef"] for name in names}
    token = {"name": "mlflow", "key": "token", "optional": True}
    assert secrets["MLFLOW_TRACKING_TOKEN"] == token and secrets["TRACKIO_SPACE_ID"]["name"] == "trackio"
    assert secrets["HF_TOKEN"] == {"name": "mine", "key": "hub"} and "0123456789abcdef" not in text
    assert not {*names} & variables(pods(rayjob(render_kubernetes_job(POD)))[0]).keys()
    assert {*names} & variables(pods(rayjob(text))[1]).keys() == {"HF_TOKEN"}  # workers send nothing, but read for you


def built(folder):
    """What kustomize makes of a folder."""
    tool = shutil.which("kustomize")
    command = [tool, "build"] if tool else [shutil.which("kubectl"), "kustomize"]
    if not command[0]:
        pytest.skip("needs kustomize, or kubectl")
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


EXPECTED = {  # overlay -> what it changes in the RayJob
    "kueue": lambda job: (
        job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
        and cluster_of(job)[1]["replicas"] == cluster_of(job)[1]["minReplicas"] == cluster_of(job)[1]["maxReplicas"]
        and not cluster_of(job)[0]["enableInTreeAutoscaling"]
    ),
    "volcano": lambda job: job["metadata"]["labels"]["volcano.sh/queue-name"] == "training",
    "rdma": lambda job: "rdma/hca_shared_devices_a" in pods(job)[1]["containers"][0]["resources"]["limits"],
    "efa": lambda job: pods(job)[1]["containers"][0]["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32",
    "prometheus": lambda job: True,
    "priority": lambda job: {pod["priorityClassName"] for pod in pods(job)} == {"training"},
}


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_kustomize_builds_every_folder(folder):
    manifests = built(folder)
    for document in manifests:
        CHECK.validate(document)
    if folder.name == WITHOUT_RAY.split("/")[1]:
        assert {document["kind"] for document in manifests} == {"Job", "Service", "NetworkPolicy"}
        return
    [job] = [document for document in manifests if document["kind"] == "RayJob"]
    for release in RELEASES:
        release.validate(job)
    assert EXPECTED.get(folder.name, lambda job: True)(job)
    for pod in pods(job):
        [container] = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_every_folder_is_one_that_kubectl_applies():
    """`kubectl apply -k FOLDER`, as each manifest says, of all files in it but a claim's, which outlives the job."""
    for folder in {path.parent for path in (JOBS / "kubernetes").rglob("*.yaml")}:
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        of_folder = {path.name for path in folder.iterdir() if not path.name.startswith(("kustomization", "claim-"))}
        assert {name for name in listed if "/" not in name} == of_folder, folder.name


def test_every_overlay_is_expected_to_change_something():
    assert {folder.name for folder in OVERLAYS if folder.parent.name == "overlays"} == EXPECTED.keys()
