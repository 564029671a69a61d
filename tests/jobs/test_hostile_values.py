"""No value of a job's option is read as anything but itself: by bash, by PyYAML, and by Kubernetes' YAML."""

import re
import subprocess
from dataclasses import fields, replace
from functools import cache

import pytest
import yaml

from platform.jobs import kubernetes, slurm
from platform.jobs.job_options import KubernetesOptions, SlurmOptions, split_and_check_job_options
from platform.jobs.planned_run import plan_job
from tests.jobs.test_kubernetes import CHECK, documents

RUN = "+experiment=one_gpu data=text data.path=/shared/corpus checkpoint.url=/shared/checkpoints".split()
POD = ["job.image=i", "job.claim=c"]
SHELL = ["$(touch hit)", "$(touch${IFS}hit)", "`touch${IFS}hit`", "a);touch${IFS}hit;(", "a;touch${IFS}hit", "|", ">a"]
SHELL += ["a'b", 'a"b', "&a", "${HOME}", "a\\", "#a", "a #b", "a b", "*", "~", "!a", "-a", "$$"]
WORDS = ["yes", "no", "y", "n", "on", "off", "true", "null", "~", "1e3", "0x1f", "0o17", "1_0", "2024-01-01", "1:30"]
WORDS += [
    "a b",
    "a: b",
    "a #b",
    "- a",
    "{a}",
    "[a]",
    "*a",
    "&a",
    "!a",
    "@{name}",
    "@{image}",
    "é",
    "a{",
    "}",
    "$(HOME)",
]
LISTS = {"select": "{0}={0}", "head_select": "{0}={0}", "secrets": "{0}=/{0}", "options": "--{0}"}
# texts without quotes that the parser of Kubernetes takes for a truth or a number, and PyYAML does not
OTHERWISE = re.compile(r"[:-] ([yYnN]|[-+]?\.?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+|0[oO]\w+)[,}\]\n]")


@cache
def planned(kind):
    pod = POD if kind is KubernetesOptions else []
    return plan_job(kind, [*RUN, *pod], None, lambda o: "/shared/runs/a")


def accepted(kind, text, left_out=("setup",)):
    """The options of a job that take a text, with it."""
    values = {}
    for f in fields(kind):
        typed = f"job.{f.name}={LISTS.get(f.name, '{0}').format(text)}"
        if (
            f.name not in left_out
            and f.type in ("str", "list[str]")
            and not split_and_check_job_options(kind, [typed])[2]
        ):
            values[f.name] = getattr(split_and_check_job_options(kind, [typed])[0], f.name)
    return values


def rendered(monkeypatch, module, kind, values):
    run = planned(kind)
    monkeypatch.setattr(module, "plan_job", lambda *arguments: replace(run, options=replace(run.options, **values)))
    return (module.render_slurm_job if module is slurm else module.render_kubernetes_job)([])


@pytest.mark.parametrize("text", SHELL)
def test_a_script_runs_no_value(text, tmp_path, monkeypatch):
    values = accepted(SlurmOptions, text)
    script = rendered(monkeypatch, slurm, SlurmOptions, {"runtime": "pyxis", "image": "i"} | values)
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    [node] = re.findall(r"^node=\(\n.*?^\)$", script, re.M | re.S)
    [box] = re.findall(r"^box=\(.*\)$", script, re.M)
    probe = f'shared=/s\n{node}\n{box}\nprintf "%s\\0" "${{node[@]}}" "${{box[@]}}"'
    shown = subprocess.run(["bash", "-uc", probe], cwd=tmp_path, text=True, capture_output=True)
    assert shown.stderr == "" and list(tmp_path.iterdir()) == []
    if "interface" in values:
        assert f"--interface={text}" in shown.stdout.split("\0")
    if "mounts" in values:
        assert any(f"{text}:{text}" in word for word in shown.stdout.split("\0"))


def leaves(value):
    if isinstance(value, dict | list):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from leaves(part)
    else:
        yield value


@pytest.mark.parametrize("launcher", ["ray", "torchrun"])
@pytest.mark.parametrize("text", WORDS + SHELL)
def test_a_manifest_has_each_value_as_it_was_typed(text, launcher, monkeypatch):
    left_out = {"launcher", "mount", *(("head_select", "head_tolerate", "wait") if launcher == "torchrun" else ())}
    values = accepted(KubernetesOptions, text, left_out)
    text_of_job = rendered(monkeypatch, kubernetes, KubernetesOptions, values | {"launcher": launcher})
    plain = rendered(monkeypatch, kubernetes, KubernetesOptions, {"launcher": launcher})
    job = documents(text_of_job)
    assert len(job) == len(documents(plain)) and not OTHERWISE.search(re.sub(r"^ *#.*$", "", text_of_job, flags=re.M))
    for document in job:
        CHECK.validate(document)
    read = set(leaves(job))
    for name, value in values.items():
        if name not in (
            "time",
            "wait",
            "secrets",
            "select",
            "head_select",
            "tolerate",
            "head_tolerate",
            "pull_secrets",
        ):
            assert value in read, name
    assert values.get("name", text) in {document["metadata"]["name"] for document in job} or "name" not in values
    assert all(isinstance(name, str) for name in read if "workers" in f"{name}")


@pytest.mark.parametrize("text", ["y", "N", "1e3", "0o17", "a,b", "a}", "[a", "${A}", "1_0.5"])
def test_a_value_is_the_same_text_alone_and_on_a_line_with_others(text):
    shown = kubernetes._format_value(text)
    assert shown[0] == "'" and yaml.safe_load(shown) == yaml.safe_load(f"{{a: {shown}}}")["a"] == text
