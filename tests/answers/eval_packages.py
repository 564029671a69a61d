"""Where lm-eval and sacrebleu are for tests: a folder of their own under build/, as they bring dozens of packages."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "build" / "eval"
PACKAGES = ("lm-eval==0.4.13", "sacrebleu==2.6.0")
RUN = "import sys; sys.path.append({folder!r}); from platform.{module} import main; sys.exit(main(sys.argv[1:]))"


@cache
def installed() -> str:
    """Installs the packages into FOLDER, unless they are there; "", or why they cannot be had."""
    if (FOLDER / "lm_eval").is_dir() and (FOLDER / "sacrebleu").is_dir():
        return ""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(FOLDER)]
    done = subprocess.run([*pip, *PACKAGES], capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def evaluated(cwd: Path, *arguments: str, module: str = "evaluate") -> subprocess.CompletedProcess[str]:
    """What platform.evaluate, or another command, says where these packages are; the project's own come first, and
    nothing is downloaded."""
    if why := installed():
        pytest.skip(why)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(cwd / "home")}
    command = [sys.executable, "-c", RUN.format(folder=str(FOLDER), module=module), *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | offline, capture_output=True, text=True)
