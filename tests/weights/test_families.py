"""Models of transformers in and out: random ones of every family equal it in logits and gradients, and what is exported
is what save_pretrained writes, bit by bit."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from platform.boundary.files.local_files import Local
from platform.checkpoint.blocks.box import Box
from platform.checkpoint.storage import catalogue
from platform.config.fields import Config, Model
from platform.parallel.communicator.base import SingleRank
from platform.parallel.parallel_ops import PassPosition
from platform.planning.make_plan import make_plan
from platform.train.protocol.replies import Differences
from platform.train.step.training_state import State
from platform.weights.exporting import export_model, exportable
from platform.weights.families import known
from platform.weights.importing import import_model, importable
from platform.weights.names import stored_tensors
from platform.weights.translate import family_of, model_keys
from tests.harness.oracle import Tokens, configure, trainer_of
from tests.weights import peer

FAMILIES = list(peer.MODELS)
EVERY = [*FAMILIES, *(pytest.param(name, marks=pytest.mark.full) for name in peer.MORE)]
FORMS = [(name, False) for name in FAMILIES] + [(name, True) for name in FAMILIES if known.FAMILIES[name].fused]
FORMS += [pytest.param(name, "moe" in name, marks=pytest.mark.full) for name in peer.MORE]


def saved(folder: Path, name: str, double: bool = False, fused: bool = False, **more: Any) -> tuple[Path, Any]:
    """A random model, and the folder to which transformers saves it, with its experts in stacks if `fused`."""
    model = peer.build(name, double, **more)
    model.save_pretrained(folder / "theirs", save_original_format=not fused)
    return folder / "theirs", model


def started(folder: Path, precision: str) -> tuple[Config, Any]:
    """A trainer of the model in a folder of transformers, with its weights."""
    keys = vars(importable(str(folder), "source").model) | {"dropout": 0.0, "balance_loss": 0.0}
    if keys["kind"] == "encoder_decoder":
        keys |= {"length": 12, "source_length": 15}
    c = configure(precision=precision, **keys)
    c.train.init = str(folder)
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh), fresh=False)
    State(trainer).begin()
    return c, trainer


def data_of(c: Config) -> dict[str, torch.Tensor]:
    return {n: torch.from_numpy(rows) for n, rows in Tokens(c).batch("train", 0, c.train.global_batch).items()}


def our_logits(trainer: Any) -> torch.Tensor:
    """[batch, length, vocab] of the first global batch."""
    trainer.ops.position = PassPosition(training=False)
    found = []
    for first in range(0, trainer.config.train.global_batch, trainer.plan.sizes["batch"]):
        inputs = {n: v for n, v in trainer.load("train", first).items() if n != "labels"}
        with torch.no_grad():
            out = trainer.model.part(trainer.ops, inputs, {}, trainer.model.units)
        found.append(out["logits"].transpose(0, 1))  # whole, in one process
    return torch.cat(found)


# config.json as released, without what does not matter: Mixtral-8x7B-v0.1 and Qwen3-30B-A3B; tensors, parameters
RELEASED: dict[str, tuple[dict[str, Any], int, int]] = {
    "mixtral": ({
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1e6,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    }, 995, 46_702_792_704),
    "qwen3_moe": ({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1e6, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    }, 18867, 30_532_122_624),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_as_many_tensors_and_parameters(name):
    config, tensors, parameters = RELEASED[name]
    model = Model(**model_keys(config, ["lm_head.weight"]))
    for fused in (False, True):
        found = stored_tensors(model, known.FAMILIES[name], fused)
        assert sum(prod(t.shape) for t in found) == parameters
        assert fused or len(found) == tensors


@pytest.mark.parametrize("name", EVERY)
def test_logits_are_equal(tmp_path, name):
    folder, model = saved(tmp_path, name)
    c, trainer = started(folder, "fp32")
    data = data_of(c)
    with torch.no_grad():
        theirs = peer.logits(model, data)
    real = data["tokens"] >= 0
    assert theirs.std() > 0.1
    assert (our_logits(trainer) - theirs)[real].abs().max() < 1e-5 * max(1, theirs.abs().max())


@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_equal(tmp_path, name):
    no_padding = {"pad_token_id": None} if name.startswith(("bert", "olmoe")) else {}  # embeddings of it get none
    folder, model = saved(tmp_path, name, double=True, **no_padding)
    c, trainer = started(folder, "fp64")
    data = data_of(c)
    with peer.in_double():
        loss = F.cross_entropy(peer.logits(model, data).flatten(0, 1), data["labels"].flatten(), ignore_index=-1)
        loss.backward()
    ours: dict[str, torch.Tensor] = {}

    def keep() -> Differences:
        ours.update((n, g.clone()) for n, g in trainer.weights.gradients.items())
        return Differences()

    assert trainer.step(1, verify=keep).loss == pytest.approx(loss.item(), rel=1e-10)
    theirs = dict(model.named_parameters())
    family = family_of(json.loads((folder / "config.json").read_text()))
    tensors = stored_tensors(c.model, family, fused=bool(family.fused))  # as transformers computes them
    assert len(tensors) == len({id(p) for p in theirs.values()})
    largest = max(p.grad.abs().max() for p in theirs.values())
    for t in tensors:
        blocks = [ours[part.name][part.box.within(Box.whole(part.shape))] for part in t.parts]
        g = torch.cat([block.reshape(part.rows, part.columns) for part, block in zip(t.parts, blocks, strict=True)])
        g = (g.t() if t.turned else g).reshape(t.shape)
        error = (g - theirs[t.name].grad).abs().max()
        assert error <= 1e-10 * largest, t.name


@pytest.mark.parametrize(("name", "fused"), FORMS)
def test_a_round_trip_is_equal_in_every_byte(tmp_path, name, fused):
    """By way of a checkpoint; and without what that says of its origin, config.json is still the same."""
    folder, _ = saved(tmp_path, name, fused=fused)
    storage = Local(tmp_path / "storage")
    directory = import_model(importable(str(folder), "source"), storage)
    manifest = catalogue.verify(storage, directory)
    for number, keeps in enumerate((True, False)):
        some = manifest if keeps else replace(manifest, meta=replace(manifest.meta, values={}))
        family = "" if keeps else importable(str(folder), "source").saved.config["model_type"]
        export_model(exportable(storage, directory, some, family, fused=fused), Local(tmp_path / f"ours{number}"))
        there, here = (
            {f.name: f.read_bytes() for f in path.iterdir()} for path in (folder, tmp_path / f"ours{number}")
        )
        there.pop("generation_config.json", None)
        assert here.keys() == there.keys()
        configs = [json.loads(files.pop("config.json")) for files in (here, there)]
        if not keeps:
            for config in configs:
                for key in ("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"):
                    config.pop(key, None)
        assert configs[0] == configs[1]
        assert here == there
