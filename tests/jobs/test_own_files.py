"""What a job's arguments name on the machine where it is written travels in it, or is refused before it is written."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import KEYS, set_value
from platform.jobs import planned_run
from platform.jobs.__main__ import main
from platform.jobs.job_options import KubernetesOptions
from platform.jobs.kubernetes import render_kubernetes_job
from platform.jobs.slurm import render_slurm_job
from platform.launch import compose_config
from tests.jobs import test_slurm
from tests.jobs.test_kubernetes import CHECK, documents, pods, rayjob
from tests.jobs.test_slurm import job, start  # noqa: F401  a fixture

OWN = "/etc/elastic-platform"
RUN = "+experiment=mine data=text data.path=/shared/corpus checkpoint.url=/shared/checkpoints".split()
POD = ["job.image=i", "job.claim=c"]
FILES = {
    "experiment/mine.yaml": "# @package _global_\ndefaults: [one_gpu, override /model: small, _self_]\nseed: 5\n",
    "model/small.yaml": "# 'a' \"b\" $(touch hit) ${HOME} @{name} é\ndefaults: [gpt_tiny, _self_]\nlayers: 3\n",
    "tensor/deep/er.yaml": "scheme: er\t# a tab, and no end of the line \nregions: {mlp: {d_ff: [t]}}",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the user's own files, with a module beside it."""
    for name, text in FILES.items():
        (path := tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "mine" / "notes.txt").write_text("no configuration")
    (tmp_path / "loud_module.py").write_text("VOICE = 'loud @{name}'\n")
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine/__init__.py").write_text("from package_of_mine import part\n")
    (tmp_path / "package_of_mine/part.py").write_text("PART = 1\n")
    (tmp_path / "open_package/inner").mkdir(parents=True)  # without an __init__
    (tmp_path / "open_package/inner/part.py").write_text("INNER = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "mine"
    for name in [name for name in sys.modules if name.startswith(("loud_module", "package_of_mine", "open_package"))]:
        del sys.modules[name]


def laid_out(pod, texts, place: Path) -> Path:
    """What a pod sees of a ConfigMap."""
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "own"]
    for item in volume["configMap"]["items"]:
        (path := place / item["path"]).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts["data"][item["key"]])
    return place


@pytest.mark.parametrize("key", ["--config-dir", "extend"])
def test_what_is_too_much_for_a_manifest_is_refused(folder, key):
    """By the key that names it; Kubernetes takes a megabyte."""
    (folder.parent / "package_of_mine/large.py").write_text(f"# {'x' * 900_000}\n")
    mine = "mine" if key == "--config-dir" else None
    run = RUN if mine else ["+experiment=one_gpu", *RUN[1:]]
    with pytest.raises(ConfigError, match=f"^{key}=.*: has 900.* bytes .*; a manifest carries 900000$"):
        render_kubernetes_job([*run, "extend=[package_of_mine]", *POD], mine)


@pytest.mark.parametrize("launcher", ["ray", "torchrun"])
def test_configuration_and_modules_travel_in_a_manifest(folder, launcher, tmp_path):
    typed = [*RUN, "extend=[loud_module,package_of_mine.part,open_package.inner.part,json]", "parallel.data=16"]
    text = render_kubernetes_job([*typed, *POD, f"job.launcher={launcher}"], "mine")
    for document in documents(text):
        CHECK.validate(document)
    [texts] = [document for document in documents(text) if document["kind"] == "ConfigMap"]
    if launcher == "ray":
        specs = pods(rayjob(text))
        words = shlex.split(rayjob(text)["spec"]["entrypoint"])
    else:
        specs = [
            next(document for document in documents(text) if document["kind"] == "Job")["spec"]["template"]["spec"]
        ]
        words = specs[0]["containers"][0]["args"]
    assert words[words.index("--config-dir") + 1] == f"{OWN}/conf" and str(tmp_path) not in text
    for number, pod in enumerate(specs):
        [container] = pod["containers"]
        assert {"name": "own", "mountPath": OWN} in container["volumeMounts"]
        assert {"name": "PYTHONPATH", "value": f"{OWN}/modules"} in container["env"]
        place = laid_out(pod, texts, tmp_path / f"pod{number}")
        files = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
        packages = {"package_of_mine/__init__.py", "package_of_mine/part.py", "open_package/inner/part.py"}
        modules = {"loud_module.py", *packages}
        assert files == {*(f"conf/{name}" for name in FILES), *(f"modules/{name}" for name in modules)}
        assert all((place / "conf" / name).read_text() == text for name, text in FILES.items())
        assert compose_config(RUN, str(place / "conf")).model == compose_config(RUN, "mine").model


def test_a_job_without_files_of_its_own_has_none():
    text = render_kubernetes_job(["+experiment=one_gpu", *RUN[1:], *POD])
    assert "ConfigMap" not in text and OWN not in text


def test_configuration_travels_in_a_script(folder, job):  # noqa: F811
    text = render_slurm_job([*RUN, "job.name=one-gpu"], "mine")
    shared = Path(job["FOLDER"], "runs/one-gpu.job-4711")
    process = start(job | {"RUN": f'cp -r {shared}/conf "$FOLDER/seen"'}, text)
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0
    words = test_slurm.the_run(test_slurm.calls(job))
    assert words[words.index("--config-dir") + 1] == "runs/one-gpu.job-4711/conf"
    seen = Path(job["FOLDER"], "seen")
    assert {str(path.relative_to(seen)): path.read_text() for path in seen.rglob("*.yaml")} == FILES
    assert not Path(job["FOLDER"], "hit").exists()


def test_more_than_a_manifest_carries_is_refused_before_anything_is_written(folder, monkeypatch, capsys):
    monkeypatch.setattr(planned_run, "_CARRIED", 100)
    assert main(["kubernetes", "--config-dir", "mine", *RUN, *POD, "--output", "job.yaml"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("config: --config-dir=mine: has ") and not Path("job.yaml").exists()


@pytest.mark.parametrize("key", [name for name, legal in KEYS.items() if legal.path is not None])
def test_every_path_lies_on_the_claim(key):
    """Those that are read where a job is written are set in what is composed."""
    typed = ["+experiment=one_gpu", *RUN[1:], *POD]
    run = planned_run.plan_job(KubernetesOptions, typed, None, lambda o: "/shared/runs/a")
    planned_run.refuse_outside_paths(run, "/shared")
    if key in ("run.dir", "data.cache"):
        run.arguments[:] = [word for word in run.arguments if not word.startswith(f"{key}=")] + [f"{key}=/home/me"]
    else:
        set_value(run.config, key, "/home/me")
    with pytest.raises(ConfigError) as refused:
        planned_run.refuse_outside_paths(run, "/shared")
    [line] = refused.value.violations
    assert line.startswith(f"{key}=/home/me: must lie below job.mount=/shared")
