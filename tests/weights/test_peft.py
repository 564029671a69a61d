"""Adapters in PEFT's format, both ways, against PEFT itself: `pip install .[peft]`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.checkpoint import catalogue
from platform.weights.__main__ import main
from platform.weights.peft_format import CONFIG, WEIGHTS, PeftPlace, import_adapters
from tests.weights.test_adapters import run
from tests.weights.written import tensors_of, written

peft = pytest.importorskip("peft", reason="the oracle: pip install .[peft]")
transformers = pytest.importorskip("transformers", reason="the oracle: pip install .[peft]")
IDS = torch.arange(1, 11)[None]


def saved_base(folder: Path, tied: bool = False) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 12}
    config = transformers.LlamaConfig(**sizes, **more, tie_word_embeddings=tied)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def load(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_peft_loads_ours(tmp_path):
    base = saved_base(tmp_path / "base")
    one = "tensor=serial", "parallel.data=1", "cluster=inline", "train.steps=3", "optimizer.warmup_steps=1"
    done = run(base, tmp_path / "run", *one)
    assert done.returncode == 0, done.stderr
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "ours"), "--adapters"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    adapted = logits(peft.PeftModel.from_pretrained(load(base), tmp_path / "ours"))
    assert (adapted - logits(load(base))).abs().max() > 1e-2
    torch.testing.assert_close(logits(load(tmp_path / "merged")), adapted, rtol=0, atol=1e-5)


def save_theirs(base: Path, folder: Path, **more) -> torch.Tensor:
    torch.manual_seed(1)
    model = peft.get_peft_model(load(base), peft.LoraConfig(task_type="CAUSAL_LM", **more))
    for name, p in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(p, std=0.2)
    model.save_pretrained(folder)
    return logits(model)


def check_passage(folder: Path, base: Path, adapted: torch.Tensor) -> None:
    """Import the adapters in `folder`/theirs; merged, and as PEFT reads them again, they give the logits `adapted`."""
    assert main(["import", str(folder / "theirs"), str(folder / "imported")]) == 0
    assert main(["export", str(folder / "imported"), str(folder / "merged")]) == 0
    torch.testing.assert_close(logits(load(folder / "merged")), adapted, rtol=0, atol=1e-5)
    assert main(["export", str(folder / "imported"), str(folder / "back"), "--adapters"]) == 0
    again = logits(peft.PeftModel.from_pretrained(load(base), folder / "back"))
    torch.testing.assert_close(again, adapted, rtol=0, atol=1e-5)


def test_ours_goes_on_with_theirs(tmp_path, capsys):
    base, targets = saved_base(tmp_path / "base"), ["q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head"]
    adapted = save_theirs(base, tmp_path / "theirs", r=3, lora_alpha=7, use_rslora=True, target_modules=targets)
    check_passage(tmp_path, base, adapted)
    more = f"train.init={tmp_path / 'imported'} tune.rslora=true tune.alpha=7 train.steps=2".split()
    more += ["tune.targets=[query,value,down,embedding,head]", "tensor=serial", "parallel.data=1", "cluster=inline"]
    done = run(base, tmp_path / "run", *more, "optimizer.lr=0", "optimizer.warmup_steps=0", "optimizer.weight_decay=0")
    assert done.returncode == 0, done.stderr
    for storage, name, manifest in [catalogue.select_checkpoint(str(tmp_path / "run" / "checkpoints"))]:
        catalogue.verify_checkpoint(storage, name)
        assert manifest.meta.values["base"]["url"] == str(base)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "same")]) == 0
    torch.testing.assert_close(logits(load(tmp_path / "same")), adapted, rtol=0, atol=1e-5)


SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 12}  # fmt: skip
ROUTED = {
    "Mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True},
    "GptOss": {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 4, "pad_token_id": None},
}  # whose experts are stacked rows first, or inputs first with rows in turn
ONE = "tensor=serial", "parallel.data=1", "cluster=inline", "train.steps=3", "optimizer.warmup_steps=1"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def saved_experts(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **ROUTED[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, p in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(p, std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["Mixtral", *(pytest.param(k, marks=pytest.mark.full) for k in [*ROUTED][1:])])
def test_peft_loads_experts_of_ours(tmp_path, kind, monkeypatch):
    base = saved_experts(kind, tmp_path / "base")
    done = run(base, tmp_path / "run", *ONE, "tune.rslora=true")
    assert done.returncode == 0, done.stderr
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "ours"), "--adapters"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    adapted, merged = logits(peft.PeftModel.from_pretrained(load(base), tmp_path / "ours")), load(tmp_path / "merged")
    assert (adapted - logits(load(base))).abs().max() > 1e-2
    torch.testing.assert_close(logits(merged), adapted, rtol=0, atol=1e-5)
    assert main(["import", str(tmp_path / "ours"), str(tmp_path / "imported"), "--base", str(base)]) == 0
    assert main(["export", str(tmp_path / "imported"), str(tmp_path / "again"), "--adapters"]) == 0
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "ours" / WEIGHTS).read_bytes()
    with monkeypatch.context() as patch:  # the negative control: experts first, not last
        patch.setattr(PeftPlace, "to_theirs", experts_first(PeftPlace.to_theirs))
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "wrong"), "--adapters"]) == 0
    wrong = logits(peft.PeftModel.from_pretrained(load(base), tmp_path / "wrong"))
    assert (wrong - adapted).abs().max() > 1e-3


def experts_first(to_theirs):
    def wrong(self, *of):
        a, b = to_theirs(self, *of)
        return a, b.unflatten(1, (-1, self.experts)).transpose(1, 2).flatten(1) if self.experts > 1 else b

    return wrong


@pytest.mark.parametrize("targets", [BOTH, *(pytest.param([t], marks=pytest.mark.full) for t in BOTH)], ids=str)
@pytest.mark.parametrize("kind", [pytest.param("Mixtral", marks=pytest.mark.full), "Qwen3Moe",
                                  pytest.param("GptOss", marks=pytest.mark.full)])  # fmt: skip
def test_ours_goes_on_with_experts_of_theirs(tmp_path, kind, targets):
    base = saved_experts(kind, tmp_path / "base")
    how = {"target_modules": ["q_proj"], "target_parameters": targets}
    adapted = save_theirs(base, tmp_path / "theirs", r=3, lora_alpha=7, **how)
    check_passage(tmp_path, base, adapted)
    words = {BOTH[0]: ["experts.up", "experts.gate"], BOTH[1]: ["experts.down"]}
    chosen = ",".join(["query", *(word for target in targets for word in words[target])])
    more = f"train.init={tmp_path / 'imported'} tune.alpha=7 tune.targets=[{chosen}]".split()
    more += ["optimizer.lr=0", "optimizer.weight_decay=0", "train.steps=1", "optimizer.warmup_steps=0"]
    done = run(base, tmp_path / "run", *ONE[:3], *more)
    assert done.returncode == 0, done.stderr
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "same")]) == 0
    torch.testing.assert_close(logits(load(tmp_path / "same")), adapted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("key, value", [("use_dora", True), ("bias", "all"), ("rank_pattern", {"q_proj": 2})])
def test_what_ours_do_not_express_is_refused(tmp_path, key, value):
    base = saved_base(tmp_path / "base")
    save_theirs(base, tmp_path / "theirs", r=2, target_modules=["q_proj"])
    values = json.loads((tmp_path / "theirs" / CONFIG).read_text())
    (tmp_path / "theirs" / CONFIG).write_text(json.dumps(values | {key: value}))
    with pytest.raises(ConfigError, match=key):
        import_adapters(str(tmp_path / "theirs"), "", catalogue.open_storage(str(tmp_path / "storage")))


def test_of_another_model_is_refused(tmp_path):
    base = saved_base(tmp_path / "base")
    save_theirs(base, tmp_path / "theirs", r=2, target_modules=["q_proj"])
    small = written(tmp_path / "gpt2", "gpt2", tensors_of("gpt2"))
    with pytest.raises(ConfigError, match="is no part of an adapter of"):
        import_adapters(str(tmp_path / "theirs"), str(small), catalogue.open_storage(str(tmp_path / "storage")))
