"""Optimizer state in few bytes: how moments lie in memory between updates, and the optimizer that updates from them.

`optimizer.moments=bf16` keeps each number in 16 bits. With int8 a block of SCALE_BLOCK consecutive elements of the
global parameter has one scale, its largest absolute value, and each element a code, the nearest of 256 values between
-1 and 1 ("8-bit Optimizers via Block-wise Quantization", Dettmers et al. 2022), as torchao keeps them. The plan cuts no
block, so that the numbers are the same under every plan (`violations_of_stored_states`).

Every update is computed in the type of master copies. It goes piece by piece, so that it takes little memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.config.fields import Optimizer
from platform.optimizer.optimizers import (
    PIECES,
    UNSIGNED,
    build_optimizer,
    describe_stored_states,
    probe_optimizer_state,
)
from platform.plan.model_types import LOW, SCALE_BLOCK, SCALES
from platform.runtime.flat_buffers import join_masters, split_masters
from platform.runtime.staged_memory import StagingBuffers, allocate_host_zeros, allocate_zeros

HIGH = "high"  # the copy to compute with of masters that are kept apart, whose rest is LOW
EXPONENTS = 7  # powers of ten from 1 down, among which the codes of the table divide their bits


@lru_cache(maxsize=8)
def _build_code_table(signed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the 256 values in ascending order that 8-bit codes stand for: more of them near 0, where each power of ten
    has half as many as the one above, and below 0 only if `signed`."""
    values = [0.0, 1.0]
    for power in range(EXPONENTS):
        borders = torch.linspace(0.1, 1, 2 ** (power + (not signed)) + 1)
        middles = (borders[:-1] + borders[1:]) / 2.0
        values += (10 ** (power - EXPONENTS + 1) * middles).tolist()
        values += (-(10 ** (power - EXPONENTS + 1)) * middles).tolist() if signed else []
    return torch.tensor(sorted(values), dtype=torch.float32).to(device, dtype)


def encode_blocks(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes (uint8 [elements]) and scales (fp32 [blocks]) of flat moments `x`, whole blocks of them."""
    blocks, table = x.view(-1, SCALE_BLOCK), _build_code_table(signed, x.dtype, x.device)
    scales = blocks.abs().amax(-1).clip(1e-12).float()
    scaled = (blocks / scales.to(x.dtype).view(-1, 1)).view(-1)
    codes = torch.bucketize(scaled, table, right=True, out_int32=True).sub_(1).clip_(0, 255)
    above = (codes + 1).clip_(max=255)
    below_value, above_value = table[codes], table[above]
    rounds_up = scaled - below_value >= (above_value - below_value) * 0.5
    return torch.where(rounds_up, above, codes).to(torch.uint8), scales


def decode_blocks(codes: Tensor, scales: Tensor, signed: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the flat moments of the `codes` of whole blocks and their `scales`: the inverse of `encode_blocks`."""
    return decode_numbers(codes.view(-1, SCALE_BLOCK), scales.view(-1, 1), signed, dtype).view(-1)


def decode_numbers(codes: Tensor, scales: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
    """Return the moments that `codes` stand for, each with its scale in `scales`, which may be broadcast."""
    return _build_code_table(signed, dtype, codes.device)[codes.int()] * scales.to(dtype)


def load_moment(state: Mapping[str, Any], name: str, piece: slice, dtype: torch.dtype) -> Tensor:
    """Return a piece of a stored moment of flat weights in `dtype`: a view if it is stored so, else new memory."""
    stored, *scales = view_moment(state, name, piece)
    return decode_blocks(stored, scales[0], name not in UNSIGNED, dtype) if scales else stored.to(dtype)


def store_moment(
    state: Mapping[str, Any], name: str, piece: slice, moment: Tensor, skipped: Tensor | None = None
) -> None:
    """Store a piece of the moment `name` of flat weights in an optimizer's `state`, rounded to the type there, unless
    the device says by `skipped`, a mask of no dims, that the update is left out."""
    parts = view_moment(state, name, piece)
    encoded = encode_blocks(moment, name not in UNSIGNED) if parts[1:] else (moment,)
    for part, new in zip(parts, encoded, strict=True):
        if part.data_ptr() != new.data_ptr():
            part.copy_(new if skipped is None else torch.where(skipped, part, new.to(part.dtype)))


def view_moment(state: Mapping[str, Any], name: str, piece: slice) -> list[Tensor]:
    """Return the views of a piece of a stored moment, which divides no block: its numbers, or codes and scales."""
    blocks = slice(piece.start // SCALE_BLOCK, piece.stop // SCALE_BLOCK)
    return [state[key][at] for key, at in ((name, piece), (name + SCALES, blocks)) if key in state]


def allocate_moment(w: Tensor, name: str, form: str, scaled: bool, offloaded: bool) -> dict[str, Tensor]:
    """Return a moment of the flat weights `w` as zeros in a form, and its scales if `scaled`, in memory by name."""
    allocate = allocate_host_zeros if offloaded else allocate_zeros
    scales = {name + SCALES: allocate((w.numel() // SCALE_BLOCK,), torch.float32, w.device)} if scaled else {}
    dtype = torch.bfloat16 if form == "bf16" else torch.uint8 if scaled else w.dtype
    return {name: allocate((w.numel(),), dtype, w.device), **scales}


class _Piece(NamedTuple):
    """Piece `at` of flat weights: the `settings` of their group, the optimizer's `numbers`, None before the first
    update, and the `kept` tensors by name: moments, their scales, and masters that are kept apart."""

    weights: Tensor
    at: slice
    settings: dict[str, Any]
    numbers: dict[str, Any] | None
    kept: dict[str, Tensor]


class PiecewiseOptimizer(torch.optim.Optimizer):
    """Updates flat weights piece by piece, by an inner optimizer that knows a piece alone, and its moments, which are
    decoded before the update and encoded after it; what lies in host memory comes to the device, and leaves it."""

    def __init__(self, groups: list[dict[str, Any]], o: Optimizer, halves: Mapping[int, Sequence[Tensor]]):
        """Construct the optimizer that config.optimizer `o` names, of groups of flat tensors. `halves`: id of a tensor
        -> the parts that it consists of, where it has no memory itself (`FlatBucket.halves_of`)."""
        super().__init__(groups, {"weight_decay": 0.0, "scaled": False})
        self._form, self._halves, w = o.moments, halves, groups[0]["params"][0]
        self._states, self._staging = describe_stored_states(o), StagingBuffers(w.device)
        self._moments, _ = probe_optimizer_state(o, w.dtype, w.device)
        self._inner = build_optimizer([{**g, "params": [w.new_zeros(1)]} for g in self.param_groups], o)
        self._settings = self._inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient. `closure` is not supported."""
        assert closure is None, "gradients are there"
        for name in ("grad_scale", "found_inf"):
            setattr(self._inner, name, getattr(self, name, None))
        flag = getattr(self, "found_inf", None)
        self._skipped: Tensor | None = None if flag is None else flag.bool()
        groups = zip(self.param_groups, self._settings, strict=True)
        updated = [(w, g, settings) for g, settings in groups for w in g["params"] if w.grad is not None and w.numel()]
        pieces = [p for w, g, settings in updated for p in self._divide_weights(w, {**settings, "lr": g["lr"]}, g)]
        away = [[name for name in piece.kept if self._is_offloaded(name)] for piece in pieces]
        staged = self._staging.pass_pieces([[p.kept[n] for n in names] for p, names in zip(pieces, away, strict=True)])
        for piece, names, arrived in zip(pieces, away, staged, strict=True):
            self._update_piece(piece, {**piece.kept, **dict(zip(names, arrived, strict=True))})

    def _is_offloaded(self, name: str) -> bool:
        """Return True if the kept tensor of a piece with this name lies in host memory."""
        return {LOW: self._states.offloads_masters, HIGH: False}.get(name, self._states.offloads_states)

    def _divide_weights(self, w: Tensor, settings: dict[str, Any], group: dict[str, Any]) -> Iterator[_Piece]:
        """Yield the pieces of flat weights `w` of a group, whose moments are allocated before the first update."""
        stored, fresh = self.state[w], not self.state[w]
        for name in self._moments if fresh else ():
            form = self._form, group["scaled"], self._states.offloads_states
            stored.update(allocate_moment(w, name, *form))
        numbers = {k: v for k, v in stored.items() if k.removesuffix(SCALES) not in self._moments}
        parts = dict(zip((HIGH, LOW), self._halves.get(id(w), ()), strict=False))
        for start in range(0, w.numel(), PIECES[w.device.type]):
            at = slice(start, min(start + PIECES[w.device.type], w.numel()))
            views = [(name, view_moment(stored, name, at)) for name in self._moments]
            kept = {name + end: x for name, some in views for end, x in zip(("", SCALES), some, strict=False)}
            kept |= {name: part[at] for name, part in parts.items()}
            yield _Piece(w, at, settings, None if fresh else numbers, kept)

    def _update_piece(self, piece: _Piece, kept: Mapping[str, Tensor]) -> None:
        """Update a piece of flat weights by its gradient, from its `kept` tensors, now on the device."""
        w, at, halves = piece.weights, piece.at, [kept[name] for name in (HIGH, LOW) if name in kept]
        weights = (join_masters(*halves) if halves else w.detach()[at]).requires_grad_()
        assert w.grad is not None, "who has none is left out"
        weights.grad, whole, state = w.grad[at], slice(0, weights.numel()), {}
        if piece.numbers is not None:
            loaded = {name: load_moment(kept, name, whole, w.dtype) for name in self._moments}
            state = {**deepcopy(piece.numbers), **loaded}
            del loaded
        self._inner.param_groups = [{**piece.settings, "params": [weights]}]
        self._inner.state = defaultdict(dict, {weights: state})
        del state
        self._inner.step()
        left = self._inner.state.pop(weights)
        self._inner.param_groups, weights.grad = [], None  # nothing of a piece lives on
        for name in self._moments:
            store_moment(kept, name, whole, left.pop(name), self._skipped)
        if halves:
            split_masters(weights.detach(), *halves)
        self.state[w].update(left)
