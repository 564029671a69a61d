"""Where the peers' packages are: a folder of their own under build/, beside the environment of the project.

Each is installed without what it depends on: torch and the rest are the project's. A package that cannot be had leaves
a line in place of its rows.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "peers"
PACKAGES = {
    "megatron-core": ("megatron-core==0.16.1",),
    "fairscale": ("fairscale==0.4.13",),
    "ray-train": ("pandas", "pyarrow", "tensorboardX"),
    # Its metrics need opentelemetry, which Ray brings. In 0.2.0 replicas that live end with the one that died.
    "torchft": ("torchft-nightly==2026.10.26",),
}


def use() -> None:
    """Let this process import the peers' packages; the project's own come first."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def install(package: str) -> str:
    """Install a package of PACKAGES into FOLDER unless it is there; return "", or why it cannot be had."""
    have = {f"{d.metadata['Name']}=={d.version}" for d in distributions(path=[*sys.path, str(FOLDER)])}
    names = have | {name.partition("==")[0] for name in have}
    wanted = [name for name in PACKAGES[package] if name not in names]
    if not wanted:
        return ""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", str(FOLDER), *wanted], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"])[-1]
