"""Headers of safetensors are read once by each process of a run: at composition, by the driver, and by every rank."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from platform.launch import main
from platform.weights import model_folder
from platform.weights.model_folder import SavedModel
from tests.weights.written import written

COUNTING = """
import os
from platform.weights import model_folder as folder
def counting(storage, file, read=folder.read_header, **more):
    with open(os.environ["NOTED"], "a") as notes:
        notes.write(f"{os.getpid()} {file}\\n")
    return read(storage, file, **more)
folder.read_header = counting
"""


@pytest.mark.parametrize("cluster", ["inline", "processes"])
def test_a_process_of_a_run_reads_each_header_once(cluster, tmp_path, monkeypatch):
    written(tmp_path / "hf", "llama")
    (tmp_path / f"counting_{cluster}.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("NOTED", str(tmp_path / "notes"))
    monkeypatch.setattr(
        model_folder, "read_header", model_folder.read_header
    )  # what the extension replaces is put back
    assert main([
        "+experiment=gpt_quick", f"extend=[counting_{cluster}]", "model=from_hf", f"model.source={tmp_path}/hf",
        "data=synthetic", f"cluster={cluster}", "cluster.device=cpu", "tensor=serial", "eval.every=0",
        f"parallel.data={1 if cluster == 'inline' else 2}", "train.steps=1", "train.global_batch=2",
        "train.microbatch=1", "monitor.sample=0", "optimizer.warmup_steps=0", f"run.dir={tmp_path}/run",
    ]) == 0  # fmt: skip
    noted = Counter((tmp_path / "notes").read_text().splitlines())
    assert set(noted.values()) == {1} and len(noted) == (1 if cluster == "inline" else 3)


def test_a_file_that_has_changed_is_read_again(tmp_path):
    written(tmp_path, "llama")
    before, again = SavedModel(str(tmp_path)), SavedModel(str(tmp_path))
    assert again.tensors is before.tensors
    [file] = Path(tmp_path).glob("*.safetensors")
    save_file({f"{name}.new": tensor for name, tensor in load_file(file).items()}, file)
    assert {name.removesuffix(".new") for name in SavedModel(str(tmp_path)).tensors} == before.tensors.keys()
