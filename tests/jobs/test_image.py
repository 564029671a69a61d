"""The image's file: read by hadolint, and built where buildah or a Docker daemon is."""

import os
import re
import shlex
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


BASE = "localhost/elastic-platform-base:bookworm"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
PACKAGES = "python3,python3-pip,python3-dev,python-is-python3,ca-certificates"
RUN = "python -m platform.launch +experiment=two_layer --cfg job"


def needs(*tools):
    """Skip the test, saying why, unless all of these tools are here and this is root."""
    lacking = [name for name in tools if not shutil.which(name)]
    if lacking or os.geteuid():
        pytest.skip(f"needs {', '.join(lacking) or 'root'}; Debian has {' and '.join(tools)}")


def buildah(*words, limit=3000):
    return subprocess.run(["buildah", "--storage-driver", "vfs", *words], capture_output=True, text=True, timeout=limit)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Debian with Python and pip, made here: no registry of images is asked."""
    needs("buildah", "debootstrap")
    if buildah("inspect", "--type", "image", BASE).returncode:
        folder = tmp_path_factory.mktemp("base") / "root"
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder), MIRROR]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            pytest.skip(f"no Debian from {MIRROR}: {done.stdout[-200:]}")
        next(folder.glob("usr/lib/python3.*/EXTERNALLY-MANAGED")).unlink()  # as in the official image of Python
        container = buildah("from", "scratch").stdout.strip()
        for words in (["copy", container, str(folder), "/"], ["commit", "--rm", container, BASE]):
            done = buildah(*words)
            assert done.returncode == 0, done.stderr
        shutil.rmtree(folder)
    return BASE


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_buildah_builds_it_in_the_oci_format(base):
    """For CPUs; IMAGE_OPTIONS has more words for buildah, such as indices of packages that are reached from here."""
    name = "localhost/elastic-platform-test:cpu"
    own = "\n".join(path.read_text() for path in sorted(Path("/usr/local/share/ca-certificates").glob("*.crt")))
    options = ["--format", "oci", "--isolation", "chroot", "--build-arg", f"BASE={base}", "--build-arg", f"CA={own}"]
    more = shlex.split(os.environ.get("IMAGE_OPTIONS", ""))
    done = buildah("build", *options, "--build-arg", "DEVICE=cpu", *more, "--tag", name, str(ROOT))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "not supported for OCI" not in done.stderr  # of an instruction that only Docker's format has
    container = buildah("from", "--pull-never", name).stdout.strip()
    try:
        ran = buildah("run", "--isolation", "chroot", container, "--", "sh", "-c", f"id -u; {RUN}", limit=300)
    finally:
        buildah("rm", container)
    assert ran.returncode == 0 and ran.stdout.startswith("1000\n") and "two_layer" in ran.stdout, ran.stderr


def test_every_instruction_is_one_of_the_oci_format():
    """SHELL, HEALTHCHECK and ONBUILD are Docker's alone: buildah leaves them out, with a warning."""
    instructions = {match for match in re.findall(r"^([A-Z]+) ", TEXT, re.M)}
    assert instructions <= {"ARG", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR"}


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_builds(device):
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("needs a Docker daemon")
    name = f"elastic-platform-test:{device}"
    subprocess.run(["docker", "build", "-t", name, "--build-arg", f"DEVICE={device}", str(ROOT)], check=True)
    command = f"docker run --rm {name} {RUN}".split()
    assert "two_layer" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    subprocess.run(["docker", "rmi", name], check=True)
