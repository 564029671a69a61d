"""Quantised weights as they are published, read as the numbers that they stand for: DeepSeek-V3's fp8, with a scale for
each block of a matrix, and GPT-OSS's mxfp4, with one for each 32 elements of a row.

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
    (rows, columns) or, without one, mxfp4, whose matrices [rows, columns] are stored turned."""

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
    return QuantisedTensor(shape, values, scales, block)


def _pair_mxfp4(name: str, tensors: Mapping[str, Stored], ends: tuple[str, str]) -> QuantisedTensor:
    """Return the mxfp4 tensor `name` of a saved model with its scales. Raises Refused if these do not fit."""
    values, scales = tensors[f"{name}{ends[0]}"], tensors.get(f"{name}{ends[1]}")
    if scales is None:
        raise Refused(f"{name}{ends[0]}: there is no {name}{ends[1]}")
    shape, of_scales = values[1].shape, scales[1].shape
    if len(shape) != 4 or shape[3] != 16 or shape[:3] != of_scales or {values[1].dtype, scales[1].dtype} != {"U8"}:
        raise Refused(f"{name}{ends[0]}: {list(shape)} of bytes does not fit scales {list(of_scales)}")
    return QuantisedTensor((shape[0], shape[2] * 32, shape[1]), values, scales, None)


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
