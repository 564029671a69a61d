"""Numbers and tables that no plan can have are refused in one line, take no memory, and print few digits."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from platform.boundary.refusals import ConfigError
from platform.launch import compose_config
from platform.plan.__main__ import main
from platform.predict.make_plan import count_replicas

ROW = "hardware,gpus,layers,d_model,heads,length,vocab,microbatch,global_batch,seconds\n"
WORLDS = ["100000000", "1" + "0" * 23, "9" * 5000]
OPTIONS = {
    "--tokens -5": "--tokens=-5.0: must be >= 1 and <= 1,000,000,000,000,000,000",
    "--tokens nan": "--tokens=nan: must be >= 1 and <= 1,000,000,000,000,000,000",
    "--tokens 1e400": "--tokens=inf: must be >= 1 and <= 1,000,000,000,000,000,000",
    "--workers 0 parallel.data=2": "--workers=0: must be >= 1 and <= 1,000,000",
    "--workers -3": "--workers=-3: must be >= 1 and <= 1,000,000",
    "--workers 1000000000000": "--workers=1000000000000: must be >= 1 and <= 1,000,000",
    "--workers 99999998 parallel.data=-1": "--workers=99999998: must be >= 1 and <= 1,000,000",
    "--memory -1 --shrink": "--memory=-1.0: must be >= 0.0001",
    "--memory nan --shrink": "--memory=nan: must be >= 0.0001",
    "model.d_model=1e99": "model.d_model=1e99: must be an integer; nearest legal: 1048576",
    "model.d_model=-1e99": "model.d_model=-1e99: must be an integer; nearest legal: 64",
    "model.d_model=128.0": "model.d_model=128.0: must be an integer; nearest legal: 128",
}
TABLES = {
    "": ": is empty",
    "\n\n# a remark\n": ": is empty",
    ROW.replace(",", ";"): ": its columns are separated by ';', must be by ','",
    ROW.replace(",", "\t"): r": its columns are separated by '\t', must be by ','",
    ROW: ": has no rows below its columns",
    f"{ROW}cpu,1000001,2,64,4,64,512,1,4,1\n": ", row 1, column gpus=1000001: must be <= 1,000,000",
}


@pytest.mark.parametrize("typed", OPTIONS)
def test_a_number_that_no_plan_has_is_refused_in_one_line(typed, capsys):
    assert main(typed.split()) == 2
    assert capsys.readouterr().err == f"config: {OPTIONS[typed]}\n"


@pytest.mark.parametrize("text", TABLES)
def test_a_table_without_columns_or_rows_is_refused_in_one_line(text, tmp_path, capsys):
    (path := tmp_path / "table.csv").write_text(text)
    assert main(["compare", str(path)]) == 2
    assert capsys.readouterr().err == f"table: {path}{TABLES[text]}\n"


def test_a_world_of_any_size_takes_no_memory(tmp_path):
    """The seats of 100,000,000 workers would not fit: under a limit of 2 GB for all of the process."""
    for number, gpus in enumerate(WORLDS):
        (tmp_path / f"{number}.csv").write_text(f"{ROW}cpu,{gpus},2,64,4,64,512,1,100000000,1\n")
    program = "\n".join(
        (
            "import resource, sys",
            "from platform.plan.__main__ import main",
            "statuses = [main(['compare', path]) for path in sys.argv[1:]]",
            "sys.exit(statuses != [2] * len(statuses))",
        )
    )
    child = subprocess.run(
        [sys.executable, "-c", program, *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
    )
    lines = child.stderr.splitlines()
    assert (child.returncode, len(lines)) == (0, len(WORLDS)), child.stderr[-2000:]
    assert all("column gpus=" in line and "must be <= 1,000,000" in line and len(line) < 600 for line in lines)


def test_workers_are_counted_within_bounds():
    config = compose_config(["parallel.data=-1"])
    assert count_replicas(config, 10**6) == 10**6
    with pytest.raises(ConfigError, match="parallel.data=-1: 100000000 workers, of which there may be 1000000"):
        count_replicas(config, 10**8)


def test_an_error_of_any_size_is_printed_in_few_digits(tmp_path, capsys):
    (path := tmp_path / "table.csv").write_text(f"{ROW}cpu,1,2,64,4,64,512,1,4,1e-300\ncpu,1,2,64,4,64,512,2,4,1e-3\n")
    for calibrate in ([], ["calibrate=0.5"], ["--leave-one-out"]):
        assert main(["compare", str(path), *calibrate]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.split())) < 30 and "e+" in out
