"""The image's file: read by hadolint, and built where a Docker daemon is."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.jobs.test_slurm import tool

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def test_hadolint_has_nothing_to_say(tmp_path):
    checker = tool("hadolint")
    done = subprocess.run([checker, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM python:latest\nRUN cd /tmp && sudo true\n")
    assert subprocess.run([checker, str(wrong)], capture_output=True).returncode


def test_it_installs_what_the_tests_ran_with_and_no_tools():
    """The line of sed, run here on the file that it is meant for."""
    [script] = re.findall(r"^RUN (sed .*?) > installed\.txt", TEXT, re.M)
    requirements = ROOT / "requirements.txt"
    done = subprocess.run(script, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    runtime, _, tools = requirements.read_text().partition("# For development")
    assert re.sub(r"(?m)^ray==", "ray[default]==", runtime).strip() == done.stdout.strip()
    assert "ray[default]==" in done.stdout and "torch==" in done.stdout and "pytest" in tools


def test_it_runs_as_the_user_of_the_jobs_and_leaves_the_checkout_s_dirt_out():
    assert "USER 1000" in TEXT and "--uid 1000" in TEXT
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs"} <= {*ignored}
    needed = re.findall(r"only-include = \[(.*)\]", (ROOT / "pyproject.toml").read_text())[0]
    assert not {name.strip('" ') for name in needed.split(",")} & {*ignored}


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_builds(device):
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("needs a Docker daemon")
    name = f"elastic-platform-test:{device}"
    subprocess.run(["docker", "build", "-t", name, "--build-arg", f"DEVICE={device}", str(ROOT)], check=True)
    command = f"docker run --rm {name} python -m platform.launch +experiment=two_layer --cfg job".split()
    assert "two_layer" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    subprocess.run(["docker", "rmi", name], check=True)
