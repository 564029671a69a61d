"""Adapters beside modules of multi-token prediction: trained, resumed, left out, merged, and given to PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.checkpoint.moves import read_tensor
from platform.launch import compose_config
from platform.weights.__main__ import main
from platform.weights.importing import open_importable, open_initial_weights, read_weight
from platform.weights.stored_adapters import StoredAdapters, parse_stored_tune
from platform.weights.tensor_names import parse_stored_model
from tests.weights.test_adapters import losses, newest, run
from tests.weights.test_multi_token import LAYERS, published

MODULE = f"layers.{LAYERS}"
ONE = "tensor=serial", "parallel.data=1", "cluster=inline", "optimizer.warmup_steps=1", "model.length=20"
TARGETS = "tune.targets=[query_up,attention.output,experts.*,merge_*]"


MORE = *ONE, TARGETS, "model.predict_ahead=1", "train.steps=3"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """A published base, and a run that trained adapters of it and its module."""
    home = tmp_path_factory.mktemp("modules")
    published(home / "base", "deepseek_v3")
    done = run(home / "base", home / "run", *MORE)
    assert done.returncode == 0, done.stderr
    return home / "base", home / "run"


def stored_of(directory: Path) -> StoredAdapters:
    storage, name, manifest = newest(directory)
    identity = manifest.meta.identity
    return StoredAdapters(storage, name, manifest, parse_stored_model(identity), parse_stored_tune(identity))


def test_a_checkpoint_has_them(trained):
    _, _, manifest = newest(trained[1])
    names = {n.removeprefix(f"model.{MODULE}.") for n in manifest.tensors if n.startswith(f"model.{MODULE}.")}
    assert {n.rpartition(".")[2] for n in names} == {"lora_a", "lora_b", "choice_bias"}
    assert {"attention.output.lora_a", "merge_hidden.lora_a", "merge_embedding.lora_b"} <= names


@pytest.mark.full
def test_a_run_goes_on_with_them(trained):
    base, whole = trained
    for stop in ("train.stop_at=2", "train.stop_at=0"):
        done = run(base, whole.parent / "stopped", *MORE, stop)
        assert done.returncode == 0, done.stderr
    assert losses(whole.parent / "stopped") == losses(whole) and len(losses(whole)) == 3


def test_the_merged_model_has_its_module_with_the_sum(trained, tmp_path):
    base, directory = trained
    assert main(["export", str(directory), str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    before, after = (open_importable(str(folder), "source") for folder in (base, tmp_path / "merged"))
    assert after.model == before.model and after.model.predict_ahead == 1
    weights = []
    for source in (base, tmp_path / "merged"):
        c = compose_config([f"model.source={source}", "data=synthetic", "model.predict_ahead=1", "model.length=20"])
        weights.append(open_initial_weights(c))
    for weight in (f"{MODULE}.merge_hidden", f"{MODULE}.attention.output", "layers.0.attention.output"):
        old, new = (read_weight(w, f"model.{weight}").double() for w in weights)
        read = [read_tensor(*newest(directory), f"model.{weight}.{part}") for part in ("lora_b", "lora_a")]
        added = 32 / stored_of(directory).tune.rank * torch.tensordot(*(x.double() for x in read), 1)
        assert added.any() and torch.allclose(new, old + added.reshape(old.shape), rtol=1e-6, atol=1e-6), weight


def opened(directory: Path, *more: str) -> Any:
    c = compose_config([f"model.source={directory.parent / 'base'}", "data=synthetic", "model.length=20", *more])
    c.train.init = str(directory / "checkpoints")
    return open_initial_weights(c)


def test_a_model_without_modules_leaves_their_adapters_out(trained):
    """As generation has it; its other weights are those that the whole model merges."""
    _, directory = trained
    without, whole = opened(directory), opened(directory, "model.predict_ahead=1")
    names = {p.name for p in without.pieces}
    assert names < {p.name for p in whole.pieces} and not [n for n in names if n.startswith(f"model.{MODULE}.")]
    assert all(torch.equal(read_weight(without, n), read_weight(whole, n)) for n in names)


def test_adapters_of_modules_do_not_go_on_without_them(trained):
    _, directory = trained
    tuned = "tune=lora", "tune.rank=3", TARGETS
    assert opened(directory, *tuned, "model.predict_ahead=1").base
    with pytest.raises(ConfigError, match=rf"holds other adapters: {MODULE}\..* has another one here, or none"):
        opened(directory, *tuned[:2], TARGETS.replace(",merge_*", ""))


def test_modules_that_the_base_lacks_are_refused(tmp_path):
    published(tmp_path / "base", "deepseek_v3")
    done = run(tmp_path / "base", tmp_path / "run", *ONE, "model.predict_ahead=2")
    assert done.returncode == 2 and "config: model.predict_ahead=2: the weights have 1" in done.stderr
    assert done.stderr.rstrip().endswith("nearest legal: 1")


def test_peft_gets_those_of_the_layers(trained, tmp_path, capsys):
    """Of a module transformers has none; PEFT's adapters give the logits of the merged model's layers."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base, directory = trained
    assert main(["export", str(directory), str(tmp_path / "merged")]) == 0
    assert main(["export", str(directory), str(tmp_path / "ours"), "--adapters"]) == 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.arange(1, 11)[None]
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(load(base), tmp_path / "ours").eval()(ids).logits
        plain, merged = (load(folder).eval()(ids).logits for folder in (base, tmp_path / "merged"))
    assert (adapted - plain).abs().max() > 1e-2
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5)
