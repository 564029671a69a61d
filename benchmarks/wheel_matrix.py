"""The wheel outside the checkout: Pythons x torch x Ray, the lowest and the highest that pyproject.toml allows.

    python benchmarks/wheel_matrix.py                     # present: this Python's own torch and Ray, no download
    python benchmarks/wheel_matrix.py --python python3.11 python3.12 --torch lowest highest --ray lowest highest
    python benchmarks/wheel_matrix.py --python python3.13 --torch none --ray none     # only what needs neither

Each combination gets an environment of its own, in which pip installs the wheel and its dependencies (`present`: those
of the Python that runs this, by a .pth). Then, from an empty folder: Python's own `platform` and ours, the files that
travel along, a plan, a run in one process, in two processes and on Ray, and an example with callbacks and a resume.
`--torch` and `--ray` take versions too. torch's CUDA builds are gigabytes: PIP_INDEX_URL may name torch's CPU index.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRESENT, NONE = "present", "none"
NAMES = (
    "import platform; from platform.api import FILES; print(platform.system(), sorted(p.name for p in FILES.iterdir()))"
)
SMALL = "+experiment=two_layer cluster.device=cpu train.steps=2 optimizer.warmup_steps=0 tensor.axes.rows=1".split()
TRAIN = ["-m", "platform.launch", *SMALL]
VERSIONS = (
    "import importlib.metadata as m; print(*(m.version(n) if n in {packages} else '-' for n in ('torch', 'ray')))"
)
CHECKS = {  # name -> (arguments of Python, text that must be printed, what it needs)
    "names": (["-c", NAMES], "'jobs'", ()),
    "plan": (["-m", "platform.plan", "+experiment=gpt_quick"], "parameters", ()),
    "inline": ([*TRAIN, "cluster=inline", "tensor.axes.cols=1", "run.dir=inline"], "run directory:", ("torch",)),
    "processes": ([*TRAIN, "cluster=processes", "tensor.axes.cols=2", "run.dir=two"], "run directory:", ("torch",)),
    "example": ([str(ROOT / "examples" / "callbacks_and_resume.py")], "done: 6 steps", ("torch",)),
    "ray": ([*TRAIN, "cluster=local", "tensor.axes.cols=2", "run.dir=ray"], "run directory:", ("torch", "ray")),
}


class Failed(Exception):
    """Reports a command that did not do what it should."""


def execute(*command: str | Path, cwd: Path, expect: str = "") -> str:
    """Run a command without the checkout on its path and return its output. Raises Failed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode or expect not in done.stdout:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no output"]
        raise Failed(last[0][:150])
    return done.stdout.strip()


def lowest(package: str) -> str:
    """Return the lowest version that pyproject.toml allows, as X.Y.0."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    line = next(line for line in wanted if re.match(rf"{package}\b", line))
    version = re.search(r">=([\d.]+)", line)
    assert version
    return version[1] + ".0" * (2 - version[1].count("."))


def pinned(package: str, version: str) -> str:
    """Return pip's requirement for a version, `lowest` or `highest`."""
    return package if version == "highest" else f"{package}=={lowest(package) if version == 'lowest' else version}"


def environment(folder: Path, python: str, torch: str, ray: str, wheel: Path) -> Path:
    """Make an environment with the wheel and what it needs; return its Python."""
    present = PRESENT in (torch, ray)
    execute(python, "-m", "venv", *(["--without-pip"] if present else []), folder / "venv", cwd=folder)
    own = folder / "venv" / "bin" / "python"
    if present:
        packages = execute(own, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
        Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", own, "install", "--quiet"]
    execute(*pip, "--no-deps", wheel, cwd=folder)
    if present and ray not in (PRESENT, NONE):  # before the other in sys.path
        execute(*pip, "--no-deps", "--ignore-installed", pinned("ray", ray), cwd=folder)
    if not present:
        others = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        kept = [line for line in others if not re.match(r"(torch|ray)\b", line)]
        chosen = [pinned(name, version) for name, version in (("torch", torch), ("ray", ray)) if version != NONE]
        execute(*pip, *kept, *chosen, cwd=folder)
    return own


def combination(python: str, torch: str, ray: str, wheel: Path) -> Iterator[str]:
    """Yield the cells of a combination: the versions, then seconds of each check or why it failed."""
    packages = [name for name, version in (("torch", torch), ("ray", ray)) if version != NONE]
    with tempfile.TemporaryDirectory(prefix="w") as name:  # short: Ray's sockets
        folder, empty = Path(name), Path(name) / "empty"
        empty.mkdir()
        try:
            own = environment(folder, python, torch, ray, wheel)
            yield execute(own, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])", cwd=empty)
            yield from execute(own, "-c", VERSIONS.format(packages=packages), cwd=empty).split()
        except Failed as error:
            yield f"cannot be installed: {error}"
            return
        for arguments, expect, needs in CHECKS.values():
            start = time.perf_counter()
            try:
                if set(needs) <= set(packages):
                    execute(own, *arguments, cwd=empty, expect=expect)
                    yield f"{time.perf_counter() - start:.0f} s"
                else:
                    yield "-"
            except Failed as error:
                yield f"failed: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    parser.add_argument("--torch", nargs="+", default=[PRESENT], help="present, lowest, highest, none or a version")
    parser.add_argument("--ray", nargs="+", default=[PRESENT], help="present, lowest, highest, none or a version")
    asked = parser.parse_args()
    sound = True
    with tempfile.TemporaryDirectory() as name:
        build = Path(name)
        source = shutil.ignore_patterns(".*", "runs", "tests")
        shutil.copytree(ROOT, build / "source", ignore=source)
        execute(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
                "--wheel-dir", build, build / "source", cwd=build)  # fmt: skip
        (wheel,) = build.glob("*.whl")
        print("| " + " | ".join(["Python", "torch", "Ray", *CHECKS]) + " |")
        print("|" + "---|" * (3 + len(CHECKS)))
        for combined in product(asked.python, asked.torch, asked.ray):
            cells = list(combination(*combined, wheel))
            sound &= len(cells) == 3 + len(CHECKS) and not any("failed" in cell for cell in cells)
            print("| " + " | ".join(cells if len(cells) > 1 else [*combined, *cells]) + " |", flush=True)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
