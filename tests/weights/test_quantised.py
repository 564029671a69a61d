"""Weights in fp8 and mxfp4 as they are published: read as the numbers that transformers makes of them, whatever parts a
plan asks for."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from platform.boundary.local_files import LocalStorage
from platform.boundary.refusals import ConfigError
from platform.checkpoint import blocks, catalogue
from platform.weights import model_folder
from platform.weights.exporting import open_exportable
from platform.weights.importing import import_model, open_importable
from tests.weights import peer
from tests.weights.written import tensors_of, written

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 8], "activation_scheme": "dynamic"}
OSS = {"d_model": 32, "expert_d_ff": 64, "d_kv": 8}


def blocks_of(shape: tuple[int, ...], sizes: tuple[int, int]) -> tuple[int, ...]:
    return tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))


def in_fp8() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """DeepSeek-V3's tensors, its projections in fp8, and all of them as they are meant."""
    stored, meant = {}, {}
    for name, t in tensors_of("deepseek_v3").items():
        t = t.bfloat16()
        stored[name] = meant[name] = t
        if name.endswith("_proj.weight"):
            stored[name] = values = t.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales = torch.rand(blocks_of(t.shape, (4, 8))) + 0.5
            grown = scales.repeat_interleave(4, 0)[: t.shape[0]].repeat_interleave(8, 1)[:, : t.shape[1]]
            meant[name] = (values.float() * grown).bfloat16()
    return stored, meant


def in_mxfp4() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """GPT-OSS's tensors, its experts in mxfp4, and all of them as transformers reads them."""
    peer.transformers()
    convert = importlib.import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
    stored, meant = {}, {}
    for name, t in tensors_of("gpt_oss", **OSS).items():
        stored[name] = meant[name] = t.bfloat16()
        if name.endswith(("gate_up_proj", "down_proj")):
            del stored[name]
            packed = torch.randint(256, (t.shape[0], t.shape[2], t.shape[1] // 32, 16), dtype=torch.uint8)
            scales = torch.randint(110, 140, packed.shape[:3], dtype=torch.uint8)
            stored |= {f"{name}_blocks": packed, f"{name}_scales": scales}
            meant[name] = convert(packed, scales)
    return stored, meant


KINDS: dict[str, Any] = {
    "deepseek_v3": (in_fp8, {}, FP8),
    "gpt_oss": (in_mxfp4, OSS, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
}


def both(folder: Path, name: str) -> tuple[Path, Path]:
    """Folders with the quantised model, and with what it means."""
    torch.manual_seed(0)
    make, ours, described = KINDS[name]
    stored, meant = make()
    quantised = written(folder / "quantised", name, stored, ours, quantization_config=described)
    return quantised, written(folder / "meant", name, meant, ours)


def read_all(folder: Path) -> dict[tuple[Any, ...], bytes]:
    """Every piece of a saved model's weights: its parameter and block -> its bytes."""
    source = open_importable(str(folder), "source")
    pieces = [piece for some in source.pieces_by_tensor for piece in some]
    memory = [torch.empty(piece.nbytes, dtype=torch.uint8) for piece in pieces]
    source.saved.fetch_pieces(pieces, memory)
    return {(p.name, p.dtype, p.box): m.numpy().tobytes() for p, m in zip(pieces, memory, strict=True)}


@pytest.mark.parametrize("largest", [1 << 24, 96])
@pytest.mark.parametrize("name", KINDS)
def test_pieces_are_what_is_meant(tmp_path, name, largest, monkeypatch):
    """Whole, and in pieces that begin within blocks of one scale."""
    for module in (blocks, model_folder):
        monkeypatch.setattr(module, "LARGEST_BLOCK", largest)
    monkeypatch.setattr(blocks, "LARGEST_ROW", min(largest, blocks.LARGEST_ROW) // 4)
    quantised, meant = map(read_all, both(tmp_path, name))
    assert quantised == meant
    assert len(quantised) > (100 if largest == 96 else 10)


def test_fp8_is_read_as_transformers_reads_it(tmp_path):
    stored, _ = in_fp8()
    peer.transformers()
    of_theirs = importlib.import_module("transformers.integrations.finegrained_fp8").Fp8Dequantize
    theirs = of_theirs(SimpleNamespace(quantization_config=None))
    (quantised, _), seen = both(tmp_path, "deepseek_v3"), 0
    saved = open_importable(str(quantised), "source").saved
    torch.manual_seed(0)
    stored, _ = in_fp8()
    for name, (file, t) in saved.tensors.items():
        if f"{name}_scale_inv" in stored and not (t.shape[0] % 4 or t.shape[1] % 8):
            scales = stored[f"{name}_scale_inv"]
            ours = torch.frombuffer(saved._read_bytes(file, *t.data_offsets), dtype=torch.bfloat16).view(t.shape)
            assert (ours == theirs._dequantize_one(stored[name], scales, torch.bfloat16)).all()
            seen += 1
    assert seen > 5


def test_an_export_is_plain(tmp_path):
    quantised, _ = both(tmp_path, "gpt_oss")
    storage = LocalStorage(tmp_path / "storage")
    directory = import_model(open_importable(str(quantised), "source"), storage)
    export = open_exportable(storage, directory, catalogue.verify_checkpoint(storage, directory))
    assert "quantization_config" not in export.config and export.config["dtype"] == "bfloat16"
    like = json.loads((quantised / "config.json").read_text())
    export = open_exportable(storage, directory, catalogue.verify_checkpoint(storage, directory), like=like)
    assert "quantization_config" not in export.config


def test_values_without_their_scales_are_refused(tmp_path):
    for name, end, change, line in (
        ("deepseek_v3", "0.self_attn.o_proj.weight_scale_inv", None, "o_proj.weight: is F8_E4M3, and has no model."),
        ("deepseek_v3", "0.self_attn.o_proj.weight_scale_inv", torch.ones(9, 9), "[16, 16] in blocks of [4, 8] does n"),
        ("gpt_oss", "0.mlp.experts.down_proj_scales", None, "down_proj_blocks: there is no model.layers.0.mlp.exp"),
        ("gpt_oss", "0.mlp.experts.down_proj_scales", torch.ones(4, 3, 1).byte(), "of bytes does not fit scales"),
    ):
        make, ours, described = KINDS[name]
        stored, _ = make()
        stored = {
            n: change if n.endswith(end) else t for n, t in stored.items() if change is not None or not n.endswith(end)
        }
        folder = written(tmp_path / f"{name} {change is None}", name, stored, ours, quantization_config=described)
        with pytest.raises(ConfigError, match="source=") as error:
            open_importable(str(folder), "source")
        assert line in error.value.violations[0]
    save_file({"model.norm.weight": torch.ones(2).to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="model.norm.weight: is F8_E4M3, and has no"):
        open_importable(str(folder), "source")
