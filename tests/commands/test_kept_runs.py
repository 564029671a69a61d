"""Runs that earlier versions left behind, kept in `kept_runs`, go on under this one and end as if never interrupted.

Each folder there holds `arguments.txt`, what was typed, and `run`, the run directory after `train.stop_at`. Nothing in
them is ever changed: a later version adds a folder of its own where it writes something new.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from platform.boundary.refusals import ConfigError
from platform.boundary.storage import Storage, open_storage
from platform.checkpoint import __main__ as checkpoint
from platform.checkpoint import catalogue
from platform.checkpoint.catalogue import list_attempts, verify_checkpoint
from platform.checkpoint.moves import read_tensor
from platform.cluster.run_directory import read_configuration
from platform.config.fields import Config
from platform.monitor import JsonLines, MetricsLog
from platform.weights import __main__ as weights
from platform.weights.importing import open_initial_weights
from tests.harness.commands import in_this_process, warm_command

KEPT = sorted(path for path in (Path(__file__).parent / "kept_runs").iterdir() if path.is_dir())
ONE_PROCESS = ["cluster=inline", "tensor=serial", "parallel.data=1", "parallel.zero=0"]


def rows(run: Path) -> dict[int, dict]:
    """The metrics by step; after a rollback the last row counts."""
    return {row["step"]: row for row in MetricsLog.read_rows(run / "metrics.jsonl")}


def without_plan(typed: list[str]) -> list[str]:
    return [a for a in typed if not a.startswith(("cluster=", "tensor=", "tensor.axes", "parallel.", "pipeline"))]


def newest(storage: Storage) -> dict[str, torch.Tensor]:
    directory = max(attempt.directory_name for attempt in list_attempts(storage))
    manifest = verify_checkpoint(storage, directory)
    return {name: read_tensor(storage, directory, manifest, name) for name in manifest.tensors}


def equals_the_uninterrupted(run: Path, kept: Path, tmp_path: Path, typed: list[str]) -> None:
    whole = tmp_path / "whole"
    done = in_this_process(*without_plan(typed), *ONE_PROCESS, f"run.dir={whole}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    actual, wanted = rows(run), rows(whole)
    assert actual.keys() == wanted.keys() and len(rows(kept)) < len(wanted)
    for step, want in wanted.items():
        numbers = [key for key in ("loss", "grad_norm", "lr", "val_loss") if key in want]
        for key in numbers:
            assert actual[step][key] == pytest.approx(want[key], rel=1e-9, abs=0), (step, key)
        assert (actual[step]["samples"], actual[step]["tokens"]) == (want["samples"], want["tokens"])
    tensors, wanted_tensors = (newest(open_storage(str(where / "checkpoints"))) for where in (run, whole))
    assert tensors.keys() == wanted_tensors.keys()
    for name, tensor in wanted_tensors.items():
        assert torch.allclose(tensors[name], tensor, rtol=1e-8, atol=1e-11), name


def copied(kept: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    shutil.copytree(kept / "run", tmp_path / "run")
    return tmp_path / "run", (kept / "arguments.txt").read_text().splitlines()


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_a_kept_run_goes_on_and_equals_the_uninterrupted(tmp_path, kept):
    run, typed = copied(kept, tmp_path)
    last, generation = max(rows(run)), max(e["generation"] for e in JsonLines.read_objects(run / "journal.jsonl"))
    done = in_this_process(*without_plan(typed), *ONE_PROCESS, f"run.dir={run}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"continues after step {last}" in done.stdout
    restored = [e for e in JsonLines.read_objects(run / "journal.jsonl") if e["event"] == "restored"][-1]
    assert restored["step"] == last and restored["generation"] > generation, "generations do not go on"
    equals_the_uninterrupted(run, kept / "run", tmp_path, typed)


@pytest.mark.full
@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_a_kept_run_goes_on_by_its_own_command(tmp_path, kept):
    run, typed = copied(kept, tmp_path)
    done = warm_command(*typed, f"run.dir={run}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    changed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("changed  ")}
    assert changed == {"elastic.faults:", "train.stop_at:"}, done.stdout
    equals_the_uninterrupted(run, kept / "run", tmp_path, typed)


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_a_kept_run_of_another_identity_is_refused(tmp_path, kept):
    run, typed = copied(kept, tmp_path)
    done = in_this_process(*typed, "seed=1", f"run.dir={run}", cwd=tmp_path)
    assert done.returncode == 2 and "seed: 0 there, 1 here" in done.stderr, done.stderr


@pytest.mark.parametrize("url", ["run", "run/", "run/checkpoints"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_directory_of_a_run_stands_for_its_checkpoints(tmp_path, monkeypatch, capsys, url, elsewhere):
    shutil.copytree(KEPT[0] / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    config, storage = tmp_path / "run" / "config.yaml", "run/checkpoints"
    if elsewhere and not url.endswith("checkpoints"):
        Path(storage).rename(storage := str(tmp_path / "elsewhere"))
        stored_values = yaml.safe_load(config.read_text())
        stored_values["checkpoint"]["url"] = storage
        config.write_text(yaml.safe_dump(stored_values))
    assert catalogue.split_url(url)[0].rstrip("/") == (storage if url != "run/checkpoints" else url)
    assert checkpoint.main(["show", url]) == checkpoint.main(["verify", url]) == 0
    assert checkpoint.main(["export", url, "one.safetensors"]) == weights.main(["export", url, "hf"]) == 0
    shown = capsys.readouterr().out
    assert Path("hf/config.json").is_file() and ": good, " in shown and "step " in shown
    assert open_initial_weights(with_initial_weights(url)).url.startswith(storage)


def with_initial_weights(url: str) -> Config:
    stored = read_configuration(KEPT[0] / "run")
    assert stored
    stored.train.init = url
    return stored


def test_another_model_than_the_checkpoint_s_is_told_by_its_keys():
    """It was a line of all names of parameters; a generate command showed the same."""
    config = with_initial_weights(str(KEPT[0] / "run"))
    layers, config.model.layers = config.model.layers, config.model.layers + 7
    with pytest.raises(ConfigError) as refused:
        open_initial_weights(config)
    [line] = refused.value.violations
    assert line.endswith(f"; model.layers={layers + 7} here, {layers} where the weights come from")
    assert line.count("layers.") == 5 and re.search(r": names: missing: layers\S+(, \S+){4} and \d+ more; ", line)
