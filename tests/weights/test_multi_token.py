"""Modules of multi-token prediction in and out, as DeepSeek-V3 and GLM-4.5 are published with them: bit by bit, and in
loss and gradients against transformers' own layers, joined as vLLM's deepseek_mtp.py joins them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from platform.boundary.local_files import LocalStorage
from platform.boundary.refusals import ConfigError
from platform.checkpoint import catalogue
from platform.checkpoint.blocks import Box
from platform.config.fields import Config
from platform.launch import compose_config
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.train.replies import Differences
from platform.train.training_state import RankTrainingState
from platform.weights.exporting import export_model, open_exportable
from platform.weights.importing import import_model, open_importable, open_initial_weights
from platform.weights.tensor_names import find_family, list_stored_tensors
from tests.harness.oracle import Tokens, configure, run, trainer_of
from tests.weights import peer

LAYERS = 2
SOURCES = ["deepseek_v3", "glm4_moe"]


def published(folder: Path, name: str, double: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    """A folder as its makers publish it, a layer and more behind the last: config.json and tensors."""
    from safetensors.torch import load_file, save_file

    model = peer.build(name, double, num_hidden_layers=LAYERS + 1, tie_word_embeddings=False)
    model.save_pretrained(folder, save_original_format=True)
    (file,) = folder.glob("*.safetensors")
    tensors, width = load_file(file), model.config.hidden_size
    more = {"enorm": torch.randn(width), "hnorm": torch.randn(width), "shared_head.norm": torch.randn(width),
            "eh_proj": 0.2 * torch.randn(width, 2 * width)}  # fmt: skip
    more |= {"embed_tokens": tensors["model.embed_tokens.weight"], "shared_head.head": tensors["lm_head.weight"]}
    kind = tensors["lm_head.weight"].dtype
    tensors |= {f"model.layers.{LAYERS}.{n}.weight": t.to(kind).clone() for n, t in more.items()}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    return model, tensors


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_exported_is_what_was_imported(tmp_path, name):
    from safetensors.torch import load_file

    _, tensors = published(tmp_path / "theirs", name)
    importable = open_importable(str(tmp_path / "theirs"), "source")
    assert importable.model.predict_ahead == 1
    storage = LocalStorage(tmp_path / "ours")
    directory = import_model(importable, storage)
    manifest = catalogue.verify_checkpoint(storage, directory)
    exported = export_model(open_exportable(storage, directory, manifest), LocalStorage(tmp_path / "back"))
    back = load_file(tmp_path / "back" / exported[0])
    assert back.keys() == tensors.keys()
    assert not [n for n, t in tensors.items() if back[n].dtype != t.dtype or not torch.equal(back[n], t)]
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (LAYERS, 1)


def started(folder: Path, precision: str = "fp64", depth: int = 1, **more: Any) -> tuple[Config, Any]:
    keys = vars(open_importable(str(folder), "source").model) | {"balance_loss": 0.0, "predict_ahead": depth, **more}
    c = configure(precision=precision, **keys, global_batch=4)
    c.train.init = str(folder)
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh), fresh=False)
    RankTrainingState(trainer).load_initial_weights()
    return c, trainer


def theirs_of(model: Any, tensors: dict[str, torch.Tensor], data: dict[str, torch.Tensor]) -> tuple[Any, Any, Any]:
    """The losses of head and module by transformers' layers, and the leaves by their published names."""
    at, decoder, width = f"model.layers.{LAYERS}.", model.model, model.config.hidden_size
    layers, norm = decoder.layers, decoder.norm
    own = {n: tensors[f"{at}{n}.weight"].double().requires_grad_() for n in ("enorm", "hnorm", "eh_proj")}
    shared = type(norm)(width, model.config.rms_norm_eps).double()
    shared.weight.data.copy_(tensors[f"{at}shared_head.norm.weight"])

    def rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt() * gain

    def through(part: Any, last: Any, **entered: Any) -> torch.Tensor:
        decoder.layers, decoder.norm = torch.nn.ModuleList(part), last
        out = decoder(**entered, use_cache=False).last_hidden_state
        decoder.layers, decoder.norm = layers, norm
        return out

    tokens, labels = data["tokens"], data["labels"]
    h = through(layers[:LAYERS], norm, input_ids=tokens)
    loss = F.cross_entropy(model.lm_head(h).flatten(0, 1), labels.flatten())
    e = decoder.embed_tokens(tokens.roll(-1, 1))  # the last row of which does not count
    joined = torch.cat([rms(e, own["enorm"]), rms(h, own["hnorm"])], -1) @ own["eh_proj"].t()
    h = through(layers[LAYERS:], shared, inputs_embeds=joined)
    ahead = F.cross_entropy(model.lm_head(h)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    names = {f"{at}{n}.weight": w for n, w in own.items()} | {f"{at}shared_head.norm.weight": shared.weight}
    return loss, ahead, dict(model.named_parameters()) | names


@pytest.mark.parametrize("name", SOURCES)
def test_loss_and_gradients_are_those_of_transformers_layers(tmp_path, name):
    model, tensors = published(tmp_path, name, double=True)
    c, trainer = started(tmp_path, predict_ahead_weight=0.3)
    data = {n: torch.from_numpy(rows) for n, rows in Tokens(c).batch("train", 0, c.train.global_batch).items()}
    with peer.in_double():
        loss, ahead, theirs = theirs_of(model, tensors, data)
        (loss + 0.3 * ahead).backward()
    ours: dict[str, torch.Tensor] = {}

    def keep() -> Differences:
        ours.update((n, g.clone()) for n, g in trainer.weights.gradients.items())
        return Differences()

    assert trainer.compute_mean_loss("train", 4) == pytest.approx(loss.item(), rel=1e-10)
    assert trainer.compute_mean_loss("train", 4, 1) == pytest.approx(ahead.item(), rel=1e-10)
    report = trainer.step(1, verify=keep)
    assert report.loss == pytest.approx((loss + 0.3 * ahead).item(), rel=1e-10)
    assert report.losses_ahead == [pytest.approx(ahead.item(), rel=1e-10)]
    family = find_family(json.loads((tmp_path / "config.json").read_text()))
    stored = [t for t in list_stored_tensors(c.model, family, stacks_experts=True) if t.name in theirs]
    assert len(stored) == len(theirs)
    largest = max(p.grad.abs().max() for p in theirs.values())
    for t in stored:
        blocks = [ours[part.name][part.box.relative_slices(Box.whole_tensor(part.shape))] for part in t.parts]
        error = (t.join_blocks(blocks) - theirs[t.name].grad).abs().max()
        assert error <= 1e-10 * largest, t.name


@pytest.mark.parametrize("depth", [0, 2])
def test_modules_are_left_out_or_begin_afresh_and_it_is_said(tmp_path, depth):
    published(tmp_path, "deepseek_v3")
    c, trainer = started(tmp_path, depth=depth)
    notes = open_initial_weights(c).notes
    said = ["1 modules of multi-token prediction left out; model.predict_ahead=1 has all",
            "1 modules of multi-token prediction begin afresh: the weights have none"]  # fmt: skip
    assert [line for line in notes if "multi-token" in line] == [said[bool(depth)]]
    fresh = [n for n in trainer.weights.master if n.startswith("layers.3.")]
    assert bool(fresh) == bool(depth)
    if depth:
        _, (scratch,) = run(configure(**{**vars(c.model)}, global_batch=4))
        for name in fresh:
            assert torch.equal(trainer.weights.master[name], scratch.initial[name].float().double()), name
        assert not torch.equal(
            trainer.weights.master["layers.2.merge_hidden"], scratch.initial["layers.2.merge_hidden"]
        )


def test_a_run_asks_for_modules_by_the_key(tmp_path):
    """The keys of the model at model.source are taken but for this one; a checkpoint of ours is no exception."""
    published(tmp_path / "theirs", "deepseek_v3")
    storage = LocalStorage(tmp_path / "ours")
    import_model(open_importable(str(tmp_path / "theirs"), "source"), storage)
    for source in (tmp_path / "theirs", tmp_path / "ours"):
        more = [f"model.source={source}", "data=synthetic", "model.length=16"]
        assert compose_config(more).model.predict_ahead == 0
        c = compose_config([*more, "model.predict_ahead=1"])
        assert c.model.predict_ahead == 1 and not [n for n in open_initial_weights(c).notes if "multi-token" in n]


def test_a_repeated_table_that_differs_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    published(tmp_path, "deepseek_v3")
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    tensors[f"model.layers.{LAYERS}.shared_head.head.weight"][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"shared_head.head.weight differs from lm_head.weight"):
        open_importable(str(tmp_path), "source")
