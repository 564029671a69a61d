"""The options of a job: typed beside a run's own keys, refused as those are."""

import subprocess
import sys
from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.key import format_hms
from platform.jobs.__main__ import main
from platform.jobs.job_options import (
    JobOptions,
    KubernetesOptions,
    SlurmOptions,
    list_option_rows,
    parse_job_limit,
    split_and_check_job_options,
)
from platform.jobs.kubernetes import render_kubernetes_job
from platform.jobs.slurm import render_slurm_job

ONE = ["+experiment=one_gpu"]
GIVEN = [*ONE, "data=text", "data.path=/shared/corpus", "checkpoint.url=/shared/checkpoints/a"]
POD = ["job.image=i", "job.claim=c"]


def refused(write, *arguments):
    with pytest.raises(ConfigError) as error:
        write([*arguments])
    return error.value.violations


def test_options_are_taken_out_of_the_arguments_of_a_run():
    arguments = ["job.retries=3", "train.steps=4", "+job.shared=true", "job.options=[--qos=a,--x]", "job.time=48:00:00"]
    options, rest, lines = split_and_check_job_options(SlurmOptions, arguments)
    assert (options.retries, options.shared, options.options, options.time) == (3, True, ["--qos=a", "--x"], "48:00:00")
    assert rest == ["train.steps=4"] and lines == []


@pytest.mark.parametrize(
    "typed, line",
    [
        ("job.imag=a", "job.imag=a: unknown key; nearest legal: job.image, job.time, job.name"),
        ("job.retries=many", "job.retries=many: must be an integer; nearest legal: 10"),
        ("job.retries=-1", "job.retries=-1: must be >= 0; nearest legal: 0"),
        ("job.name=A b", "job.name=A b: must be 1 to 40 of a-z, 0-9 and -, a letter first"),
        ("job.time=soon", "job.time=soon: must be H:MM:SS or D-HH:MM:SS; nearest legal: 48:00:00"),
        ("job.mount=shared", "job.mount=shared: must be /PATH"),
        ("job.select=gpu", "job.select=gpu: must be KEY=VALUE"),
        ("job.secrets=[A=b]", "job.secrets=A=b: must be NAME=SECRET/KEY"),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_legal_values(typed, line):
    assert split_and_check_job_options(KubernetesOptions, [typed])[2] == [line]


def test_what_must_be_given_is_asked_for_in_a_line_each():
    lines = refused(render_kubernetes_job, *ONE)
    assert lines[0] == "data.path=: must be given; nearest legal: data=text data.path=/shared/corpus"
    keys = ["data.path", "checkpoint.url", "job.image", "job.claim"]
    assert [line.partition(";")[0] for line in lines] == [f"{key}=: must be given" for key in keys]
    assert [line.partition("=")[0] for line in refused(render_slurm_job, *ONE)] == ["data.path", "checkpoint.url"]
    lines = refused(render_slurm_job, "+experiment=cluster_check", "checkpoint.url=/a/b")
    assert lines == ["job.nodes=: must be given; nearest legal: job.nodes=2"]
    [line] = refused(render_slurm_job, *GIVEN, "job.runtime=pyxis")
    assert line.startswith("job.image=: must be given")


def test_the_demonstration_text_must_be_named_to_count_as_data():
    assert "data=stdlib" in render_slurm_job([*ONE, "data=stdlib", "checkpoint.url=/a/b"])


def test_all_mistakes_come_at_once():
    assert len(refused(render_slurm_job, *ONE, "job.retries=-1", "model.layerz=3", "train.steps=0")) == 3


def test_paths_lie_on_the_claim():
    lines = refused(render_kubernetes_job, *ONE, "data=text", "data.path=/home/me", "checkpoint.url=/tmp/a", *POD)
    assert [line.partition(":")[0] for line in lines] == ["data.path=/home/me", "checkpoint.url=/tmp/a"]
    assert "s3://bucket/a" in render_kubernetes_job([*ONE, "data=stdlib", "checkpoint.url=s3://bucket/a", *POD])


def test_a_plan_that_does_not_fit_its_gpus_is_refused():
    [line] = refused(render_slurm_job, *GIVEN, "model=gpt3_2_7b")
    assert line.startswith("cluster.memory=refuse: a worker needs ") and "A10 has 24 GB" in line


def test_no_secret_gets_into_a_file(monkeypatch):
    [line] = refused(render_kubernetes_job, *ONE, "data=stdlib", "checkpoint.url=s3://me:hushhush@host/b", *POD)
    assert line.startswith("checkpoint.url=***: a secret") and "hushhush" not in line
    monkeypatch.setenv("S3_KEY", "hushhush")
    reference = "checkpoint.url=s3://me:${oc.env:S3_KEY}@host/b"
    text = render_kubernetes_job([*ONE, "data=stdlib", reference, *POD, "job.secrets=[S3_KEY=s3/key]"])
    assert "hushhush" not in text and "${oc.env:S3_KEY}" in text
    assert text.count("{name: S3_KEY, valueFrom: {secretKeyRef: {name: s3, key: key}}}") == 2


LIGHT = """
import sys
from platform.jobs.__main__ import main
assert main({words!r}) == 0
import platform.jobs.ray_node, platform.jobs.supervisor
heavy = {{"torch", "ray", "wandb"}} & set(sys.modules)
assert not heavy, heavy
"""


def test_a_job_is_written_and_supervised_without_torch_and_ray():
    code = LIGHT.format(words=["slurm", *GIVEN])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("#!/bin/bash"), done.stderr


@pytest.mark.parametrize(
    ("name", "options"),
    [("clusters.md", JobOptions), ("slurm.md", SlurmOptions), ("kubernetes.md", KubernetesOptions)],
)
def test_the_page_lists_every_key(name, options):
    page = (Path(__file__).parents[2] / "docs" / name).read_text()
    rows = list(list_option_rows(options))
    assert "| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n" in page
    assert len(rows) > 5


@pytest.mark.parametrize(
    "flag, value",
    [("--time-limit", "nan"), ("--time-limit", "inf"), ("--notice", "nan"), ("--retries", "-1")],
)
def test_a_supervisor_is_told_numbers(flag, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["supervise", f"{flag}={value}", "run.dir=x"])
    assert ended.value.code == 2 and f"argument {flag}: must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "limit, seconds",
    [("90", 5400), ("1:30", 90), ("1:30:00", 5400), ("2-0", 172800), ("1-2:03", 93780), ("1-02:03:04", 93784)],
)
def test_a_time_limit_is_what_slurm_takes_it_for(limit, seconds):
    assert parse_job_limit(limit) == seconds and parse_job_limit(format_hms(seconds)) == seconds
    assert not split_and_check_job_options(KubernetesOptions, [f"job.time={limit}"])[2]


@pytest.mark.parametrize("limit", ["1:", ":1", "1.5", "-1", "1-", "1:2:3:4", "1-2:3:4:5", "1 0", "UNLIMITED", "1e3"])
def test_and_what_slurm_does_not_take_is_refused(limit):
    assert split_and_check_job_options(KubernetesOptions, [f"job.time={limit}"])[2]
