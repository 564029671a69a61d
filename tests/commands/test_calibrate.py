"""`python -m platform.plan calibrate` as users type it: on workers of this machine, and on mistakes."""

from __future__ import annotations

import pytest

from platform.plan.__main__ import main
from platform.predict.step_price import read_hardware
from tests.harness import warm
from tests.harness.commands import QUICK, TIMEOUT


def test_two_workers_write_a_file_that_predicts(tmp_path):
    arguments = "calibrate --output mine.yaml --workers 2 --tiny cluster=processes".split()
    done = warm.run_module("platform.plan", *arguments, cwd=tmp_path, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node: 1 group of 2 workers" in done.stdout and "written: mine.yaml" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"], "nothing else is left"
    hardware = read_hardware(str(tmp_path / "mine.yaml"))
    assert set(hardware.peaks) == {"fp64", "fp32", "bf16", "fp16"} and hardware.launch > 1e-6 and not hardware.ahead
    assert hardware.node.kinds.keys() > {"all_reduce", "all_gather", "reduce_scatter"} and not hardware.network.kinds
    assert main([QUICK, "--hardware", str(tmp_path / "mine.yaml")]) == 0


REFUSED = {
    "--output taken.yaml": "--output=taken.yaml: exists; --overwrite replaces it",
    "--output no/mine.yaml": "--output=no/mine.yaml: the folder no does not exist",
    "--output mine.txt": "--output=mine.txt: must end in .yaml, as mine.yaml",
    "--output mine.yaml --workers 0": "--workers=0: must be at least 1",
    "--output mine.yaml --workers 100000000": "--workers=100000000: must be at least 1 and at most 1,000,000",
    "--output mine.yaml --like h1000": "hardware h1000: there is no such file; legal: h100",
    "--output mine.yaml cluster.device=tpu": "cluster.device=tpu: unknown; nearest legal: cpu, auto, cuda",
    "--output mine.yaml cluster.device=cuda": "cluster.device=cuda: ",
    "": "the following arguments are required: --output",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_mistakes_are_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.yaml").write_text("kept")
    try:
        status = main(["calibrate", "cluster=processes", *arguments.split()])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert REFUSED[arguments] in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("taken.yaml", "kept")]
