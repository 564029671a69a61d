"""Quantised weights as they are published, read as the numbers that they stand for, and made of these: DeepSeek-V3's
fp8, with a scale for each block of a matrix, and GPT-OSS's mxfp4, with one for each 32 elements of a row.

In a saved model each pair of stored values and scales becomes one tensor of a file that is only computed
(`find_quantised_tensors`), in bfloat16, whose bytes `compute_bytes` gives. So all that reads files of safetensors,
under any plan, reads these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from platform.checkpoint.interchange import ForeignTensor
from platform.checkpoint.manifest import Refused
from platform.weights.config_keys import FP8_BLOCK, ConfigJson, Inexpressible, read_quantisation

_OF_32 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_SIZE = 2  # bytes of an element in bfloat16
Stored = tuple[str, ForeignTensor]  # a file, and a tensor in it
ReadBytes = Callable[[str, int, int], Any]


@dataclass(frozen=True)
class QuantisedTensor:
    """Tensor of `shape` in a saved model that is stored as `values` and `scales`: fp8 with a scale for each `block`
    (rows, columns) or, without one, mxfp4, whose matrices [rows, columns] are stored turned; `names` of both."""

    names: tuple[str, str]
    shape: tuple[int, ...]
    values: Stored
    scales: Stored
    block: tuple[int, int] | None


def find_quantised_tensors(
    tensors: Mapping[str, Stored], config_json: ConfigJson
) -> tuple[Mapping[str, Stored], dict[str, QuantisedTensor]]:
    """Return the tensors of a saved model with one in the place of each pair of values and scales, and what each file
    holds that is only computed. Raises Refused for values without fitting scales."""
    try:
        block = read_quantisation(config_json)
    except Inexpressible:  # refused with the other keys of the config.json
        block = ""
    if not block:
        return tensors, {}
    ends = ("_blocks", "_scales") if block == "mxfp4" else ("", "_scale_inv")
    plain, computed = dict(tensors), dict[str, QuantisedTensor]()
    for name, (_, values) in tensors.items():
        if block == "mxfp4" and name.endswith(ends[0]):
            tensor = _pair_mxfp4(name.removesuffix(ends[0]), tensors, ends)
        elif values.dtype == "F8_E4M3":
            tensor = _pair_fp8(name, tensors, block)
        else:
            continue
        whole, file = name.removesuffix(ends[0]), f"{name} computed"
        for end in ends:
            del plain[f"{whole}{end}"]
        plain[whole] = file, ForeignTensor("BF16", tensor.shape, (0, prod(tensor.shape) * _SIZE))
        computed[file] = tensor
    return plain, computed


def _pair_fp8(name: str, tensors: Mapping[str, Stored], block: Any) -> QuantisedTensor:
    """Return the fp8 tensor `name` of a saved model with its scales. Raises Refused if these do not fit."""
    values, scales = tensors[name], tensors.get(f"{name}_scale_inv")
    if not isinstance(block, tuple) or scales is None:
        raise Refused(f"{name}: is F8_E4M3, and has no {name}_scale_inv of a config.json's {FP8_BLOCK}")
    shape = values[1].shape
    blocks = tuple(-(-n // b) for n, b in zip(shape, block, strict=False))
    if len(shape) != 2 or scales[1].shape != blocks or not scales[1].torch_type.is_floating_point:
        raise Refused(f"{name}: {list(shape)} in blocks of {list(block)} does not fit scales {list(scales[1].shape)}")
    return QuantisedTensor((name, f"{name}_scale_inv"), shape, values, scales, block)


def _pair_mxfp4(name: str, tensors: Mapping[str, Stored], ends: tuple[str, str]) -> QuantisedTensor:
    """Return the mxfp4 tensor `name` of a saved model with its scales. Raises Refused if these do not fit."""
    values, scales = tensors[f"{name}{ends[0]}"], tensors.get(f"{name}{ends[1]}")
    if scales is None:
        raise Refused(f"{name}{ends[0]}: there is no {name}{ends[1]}")
    shape, of_scales = values[1].shape, scales[1].shape
    if len(shape) != 4 or shape[3] != 16 or shape[:3] != of_scales or {values[1].dtype, scales[1].dtype} != {"U8"}:
        raise Refused(f"{name}{ends[0]}: {list(shape)} of bytes does not fit scales {list(of_scales)}")
    names = f"{name}{ends[0]}", f"{name}{ends[1]}"
    return QuantisedTensor(names, (shape[0], shape[2] * 32, shape[1]), values, scales, None)


def compute_bytes(tensor: QuantisedTensor, start: int, end: int, read: ReadBytes) -> Tensor:
    """Return bytes [start, end) of a quantised tensor in bfloat16; `read`: reader of bytes (file, start, end)."""
    width, (first, last) = tensor.shape[-1], (start // _SIZE, end // _SIZE)
    row, end_row = first // width, -(-last // width)
    compute = _compute_mxfp4_rows if tensor.block is None else _compute_fp8_rows
    rows = compute(tensor, row, end_row, read).to(torch.bfloat16)
    return rows.flatten()[first - row * width : last - row * width].contiguous().view(torch.uint8)


def _read_rows(stored: Stored, first: int, last: int, width: int, read: ReadBytes) -> Tensor:
    """Read rows [first, last), of `width` elements each, of a tensor in a file of a saved model."""
    file, t = stored
    begin, size = t.data_offsets[0], t.torch_type.itemsize * width
    raw = read(file, begin + first * size, begin + last * size)
    if len(raw) != (last - first) * size:
        raise Refused(f"{file} is shorter than its header says")
    return torch.frombuffer(bytearray(raw), dtype=t.torch_type).view(last - first, width)


def _compute_fp8_rows(tensor: QuantisedTensor, first: int, last: int, read: ReadBytes) -> Tensor:
    """Return rows [first, last) of an fp8 matrix, each element times the scale of its block, in fp32."""
    (height, width), columns = tensor.block or (1, 1), tensor.shape[1]
    values = _read_rows(tensor.values, first, last, columns, read).float()
    top = first // height
    scales = _read_rows(tensor.scales, top, -(-last // height), -(-columns // width), read).float()
    scales = scales.repeat_interleave(height, 0)[first - top * height :][: last - first]
    return values * scales.repeat_interleave(width, 1)[:, :columns]


def _compute_mxfp4_rows(tensor: QuantisedTensor, first: int, last: int, read: ReadBytes) -> Tensor:
    """Return rows [first, last) of a stack of turned mxfp4 matrices, in fp32: two elements lie in a byte, the first in
    its lower half, and each 32 are times 2 to the power of their scale less 127."""
    _, rows, columns = tensor.shape
    parts = []
    for number in range(first // rows, -(-last // rows)):
        begin, at = number * rows, slice(number * columns, (number + 1) * columns)
        low, high = max(0, first - begin), min(rows, last - begin)
        groups = slice(low // 32, -(-high // 32))
        packed = _read_rows(tensor.values, at.start, at.stop, rows // 2, read).view(columns, -1, 16)[:, groups]
        scales = _read_rows(tensor.scales, at.start, at.stop, rows // 32, read)[:, groups]
        values = _OF_32[torch.stack((packed & 15, packed >> 4), -1).flatten(2).long()]
        matrix = torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(1)
        parts.append(matrix[:, low - 32 * groups.start : high - 32 * groups.start].t())
    return torch.cat(parts)


def quantise_as_read(tensor: QuantisedTensor, x: Tensor, read: ReadBytes) -> tuple[Tensor, Tensor]:
    """Return numbers x [*shape] as values and scales of the form in which a tensor was read. Blocks of the numbers that
    were read keep their bytes; all others are quantised as the form's publishers do it."""
    stored = [
        _read_rows(one, 0, 1, prod(one[1].shape), read).view(one[1].shape) for one in (tensor.values, tensor.scales)
    ]
    numbers = compute_bytes(tensor, 0, prod(tensor.shape) * _SIZE, read).view(torch.bfloat16).view(tensor.shape)
    changed = (x != numbers.to(x.dtype)).float()
    if tensor.block:
        values, scales = quantise_fp8(x.float(), tensor.block, stored[1])
        is_new = _largest_of_blocks(changed, tensor.block) > 0
        of_elements = _spread_over_blocks(is_new, tensor.block, tensor.shape)
        bits = torch.where(of_elements, values.view(torch.uint8), stored[0].view(torch.uint8))
        return bits.view(values.dtype), torch.where(is_new, scales, stored[1])
    codes, scales = quantise_mxfp4(x.float())
    is_new = _group_by_32(changed).amax(-1) > 0
    return torch.where(is_new.unsqueeze(-1), codes, stored[0]), torch.where(is_new, scales, stored[1])


def quantise_fp8(x: Tensor, block: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix as fp8 values and the scales of its blocks, of the type of the scales `like`: the largest value
    of a block becomes the largest of e4m3 ("DeepSeek-V3 Technical Report", 3.3.2); powers of two where all `like` are.
    """
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = _largest_of_blocks(x, block) / largest
    scales = scales.masked_fill(scales == 0, 1.0)
    if (torch.frexp(like.float()).mantissa == 0.5).all():
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scales = scales.to(like.dtype)
    spread = _spread_over_blocks(scales.float(), block, x.shape)
    return (x / spread).clamp(-largest, largest).to(torch.float8_e4m3fn), scales


def quantise_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a stack of matrices [n, rows, columns] as mxfp4 (uint8 [n, columns, groups, 16] and [n, columns, groups]),
    each 32 rows of a column by the least power of two with which none of them is above 6, as triton_kernels does it."""
    groups = _group_by_32(x)
    mantissa, exponent = torch.frexp(groups.abs().amax(-1) / 6.0)
    scales = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
    scaled = torch.ldexp(groups, -scales.unsqueeze(-1))
    steps = torch.bucketize(scaled.abs(), (_OF_32[1:8] + _OF_32[:7]) / 2)
    ties = (scaled.abs() == ((_OF_32[1:8] + _OF_32[:7]) / 2)[steps.clamp(max=6)]) & (steps % 2 == 1)
    codes = (steps + ties.int() + 8 * scaled.signbit()).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (scales + 127).to(torch.uint8)


def _group_by_32(x: Tensor) -> Tensor:
    """Return the numbers of a stack of matrices [n, rows, columns] in the order of mxfp4, [n, columns, groups, 32]."""
    return x.transpose(1, 2).unflatten(-1, (-1, 32)).contiguous()


def _largest_of_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest absolute value of each block of a matrix, whose last ones may be smaller."""
    (height, width), (rows, columns) = block, x.shape
    padded = torch.nn.functional.pad(x.abs(), (0, -columns % width, 0, -rows % height))
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax((1, 3))


def _spread_over_blocks(of_blocks: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """Return for each element of a matrix of this `shape` what its block has."""
    spread = of_blocks.repeat_interleave(block[0], 0)[: shape[0]]
    return spread.repeat_interleave(block[1], 1)[:, : shape[1]]
