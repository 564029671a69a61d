"""Weights in fp8 and mxfp4 as they are published: read as the numbers that transformers makes of them, whatever parts a
plan asks for."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from platform.boundary.local_files import LocalStorage
from platform.boundary.refusals import ConfigError
from platform.checkpoint import blocks, catalogue
from platform.weights import model_folder
from platform.weights import quantised as quantised_module
from platform.weights.__main__ import main
from platform.weights.exporting import open_exportable
from platform.weights.importing import import_model, open_importable
from tests.weights import peer
from tests.weights.written import tensors_of, written

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 8], "activation_scheme": "dynamic"}
OSS = {"d_model": 32, "expert_d_ff": 64, "d_kv": 8}


def blocks_of(shape: tuple[int, ...], sizes: tuple[int, int]) -> tuple[int, ...]:
    return tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))


def in_fp8(block: tuple[int, int] = (4, 8)) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """DeepSeek-V3's tensors, its projections in fp8, and all of them as they are meant."""
    rows, columns = block
    stored, meant = {}, {}
    for name, t in tensors_of("deepseek_v3").items():
        t = t.bfloat16()
        stored[name] = meant[name] = t
        if name.endswith("_proj.weight"):
            stored[name] = values = t.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales = torch.rand(blocks_of(t.shape, block)) + 0.5
            grown = scales.repeat_interleave(rows, 0)[: t.shape[0]].repeat_interleave(columns, 1)[:, : t.shape[1]]
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


def exported_as_read(folder: Path, quantised: Path, source: Path, *more: str) -> tuple[int, Path]:
    """A folder that a checkpoint of `source` is exported to as `quantised` was read, and the status of the command."""
    storage, out = LocalStorage(folder / "storage"), folder / "again"
    import_model(open_importable(str(source), "source"), storage)
    return main(["export", str(folder / "storage"), str(out), "--like", str(quantised), "--as-read", *more]), out


def files_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("name", KINDS)
def test_what_was_read_is_written_back_to_the_bit(tmp_path, name):
    """Values, scales, types, and what says how they are quantised."""
    quantised, meant = both(tmp_path, name)
    for source in (quantised, meant):  # a checkpoint holds the numbers alone
        status, out = exported_as_read(tmp_path / source.name, quantised, source)
        ours, theirs = files_of(out), files_of(quantised)
        assert status == 0 and ours.keys() == theirs.keys()
        for tensor, t in theirs.items():
            assert ours[tensor].dtype == t.dtype and torch.equal(ours[tensor].view(torch.uint8), t.view(torch.uint8))
        described = [json.loads((place / "config.json").read_text()) for place in (out, quantised)]
        assert described[0]["quantization_config"] == described[1]["quantization_config"]
    assert read_all(out) == read_all(meant)


def half_steps(name: str, numbers: Tensor, stored: dict[str, Tensor], tensor: str) -> Tensor:
    """Half a step of the format at each number, as it is scaled in a file."""
    if name == "gpt_oss":
        scales = torch.exp2(stored[f"{tensor}_scales"].float() - 127).repeat_interleave(32, -1)
        scales, (least, digits) = scales.transpose(1, 2), (1.0, 1)
    else:
        grown = stored[f"{tensor}_scale_inv"].repeat_interleave(4, 0)[: numbers.shape[0]]
        scales, (least, digits) = grown.repeat_interleave(8, 1)[:, : numbers.shape[1]], (2.0**-6, 3)
    powers = torch.exp2(torch.floor(torch.log2((numbers / scales).abs().clamp(min=least))))
    return scales * powers * 2.0**-digits / 2


def changed_and_exported(tmp_path: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str], Path]:
    """The numbers of a model of which a layer is trained on, its files as read, and its quantised tensors."""
    quantised, meant = both(tmp_path, name)
    make, ours, _ = KINDS[name]
    numbers, draw = files_of(meant), torch.Generator().manual_seed(1)
    stored = files_of(quantised)
    away = [tensor for tensor in numbers if tensor not in stored or f"{tensor}_scale_inv" in stored]
    for tensor in (t for t in away if ".layers.0." in t):
        x = numbers[tensor]
        numbers[tensor] = x + (torch.randn(x.shape, generator=draw) * x.float().std() / 3).bfloat16()
    trained = written(tmp_path / "trained", name, numbers, ours)
    status, out = exported_as_read(tmp_path, quantised, trained)
    assert status == 0
    return numbers, files_of(out), away, out


@pytest.mark.parametrize("name", KINDS)
def test_trained_weights_are_within_half_a_step(tmp_path, name):
    numbers, stored, away, out = changed_and_exported(tmp_path, name)
    before, read = files_of(tmp_path / "quantised"), open_importable(str(out), "source").saved
    for tensor in away:
        file, t = read.tensors[tensor]
        ours = torch.frombuffer(bytearray(read._read_bytes(file, *t.data_offsets)), dtype=torch.bfloat16).view(t.shape)
        x, bound = numbers[tensor].float(), half_steps(name, numbers[tensor].float(), stored, tensor)
        slack = 2.0**-8 * ours.float().abs()  # of what is read in bf16
        assert ((ours.float() - x).abs() <= bound * 1.001 + slack).all(), tensor
        part = f"{tensor}_blocks" if name == "gpt_oss" else tensor
        same = torch.equal(stored[part].view(torch.uint8), before[part].view(torch.uint8))
        assert same == (".layers.0." not in tensor), "a layer that is not trained keeps its bytes"


def test_negative_control_scales_of_other_blocks(tmp_path, monkeypatch):
    make = quantised_module.quantise_fp8
    monkeypatch.setattr(quantised_module, "quantise_fp8", lambda *x: (make(*x)[0], make(*x)[1].roll(1, 0)))
    with pytest.raises(AssertionError, match="_proj.weight"):
        test_trained_weights_are_within_half_a_step(tmp_path, "deepseek_v3")


def test_negative_control_numbers_that_are_all_quantised_anew(tmp_path, monkeypatch):
    compute = quantised_module.compute_bytes
    monkeypatch.setattr(quantised_module, "compute_bytes", lambda *x: compute(*x).bitwise_not())
    with pytest.raises(AssertionError):
        test_what_was_read_is_written_back_to_the_bit(tmp_path, "deepseek_v3")


def test_codes_are_the_nearest(tmp_path):
    """Of all sixteen values of e2m1, ties to the even one, as a search over them finds."""
    draw = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(64, generator=draw) * 3, torch.arange(-32, 32) / 4]).view(1, 32, 4)
    packed, scales = quantised_module.quantise_mxfp4(x)
    table = quantised_module._OF_32
    for column in range(4):
        scale = 2.0 ** (int(scales[0, column, 0]) - 127)
        assert scale / 2 < x[0, :, column].abs().max() / 6 <= scale
        codes = torch.stack((packed[0, column, 0] & 15, packed[0, column, 0] >> 4), -1).flatten().long()
        distances = (x[0, :, column, None] / scale - table).abs()
        assert torch.equal(distances.gather(1, codes[:, None])[:, 0], distances.amin(1))
        ties = (distances == distances.amin(1, keepdim=True)).sum(1) == 2
        assert (codes[ties & (x[0, :, column] != 0)] % 2 == 0).all()


@pytest.mark.parametrize("name", KINDS)
def test_transformers_reads_what_is_written_back(tmp_path, name, monkeypatch):
    """The model that it makes of the files, its quantised weights as numbers, has the checkpoint's. In fp8 it takes
    blocks for equal parts of a weight, so all are whole."""
    monkeypatch.setitem(KINDS, "deepseek_v3", (partial(in_fp8, (2, 2)), {}, {**FP8, "weight_block_size": [2, 2]}))
    transformers = peer.transformers()
    if name != "gpt_oss" and not transformers.utils.is_accelerate_available():
        pytest.skip("accelerate is not installed, without which transformers loads no fp8")
    _, _, away, out = changed_and_exported(tmp_path, name)
    how = transformers.Mxfp4Config if name == "gpt_oss" else transformers.FineGrainedFP8Config
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    known = "weight_block_size", "modules_to_not_convert"
    quantised = how(**{key: value for key, value in described.items() if key in known}, dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, quantization_config=quantised, dtype=torch.bfloat16)
    ours, state = open_importable(str(out), "source").saved, model.state_dict()
    assert len(state.keys() & {*away}) > 1
    for tensor in state.keys() & {*away}:
        file, t = ours.tensors[tensor]
        wanted = torch.frombuffer(bytearray(ours._read_bytes(file, *t.data_offsets)), dtype=torch.bfloat16)
        assert torch.equal(state[tensor].bfloat16(), wanted.view(t.shape)), tensor


@pytest.mark.parametrize(
    "more, line",
    [
        (["--dtype", "float32"], "--as-read=QUANTISED: says the types of all tensors; leave out --dtype"),
        (["--fused"], "--as-read: QUANTISED has model.layers.1.mlp.experts.0.down_proj.weight in another form, and"),
    ],
    ids=str,
)  # fmt: skip
def test_forms_that_do_not_fit_are_refused(tmp_path, more, line, capsys):
    quantised, meant = both(tmp_path, "deepseek_v3")
    status, _ = exported_as_read(tmp_path, quantised, meant, *more)
    assert status == 2 and line.replace("QUANTISED", str(quantised)) in capsys.readouterr().err
    assert main(["export", str(tmp_path / "storage"), str(tmp_path / "out"), "--as-read"]) == 2
    assert "--as-read: --like FOLDER names the model as it was read" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "storage"), str(tmp_path / "out"), "--as-read", "--like", str(meant)]) == 2
    assert "holds no quantised weights; leave it out" in capsys.readouterr().err
