"""What a run must not lose of a rank's trainer: master copies, moments of the optimizer and its few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from platform.checkpoint import Block, Held, Image, Manifest, Storage, blocks, planned, restore, shares
from platform.train.optimizers import state_of
from platform.train.trainer import Trainer
from platform.train.weights import DTYPES


class State:
    """`held`: all tensors and which rank keeps which blocks of them, equal on all ranks: model.PARAMETER, and
    MOMENT.PARAMETER for every moment of the optimizer."""

    def __init__(self, trainer: Trainer):
        self._trainer, self._plan, self._communicator = trainer, trainer.plan, trainer.communicator
        dtype = DTYPES[self._plan.precision][1]
        self._moments, self._numbers = state_of(trainer.config.optimizer, dtype, self._communicator.device)
        self.held: list[Held] = [h for kind in ("model", *self._moments) for h in planned(self._plan, kind, dtype)]
        self._image: Image | None = None

    @property
    def image(self) -> Image:
        """The host memory of this rank's file; made when it is first needed, and kept."""
        if self._image is None:
            parts = shares(self.held, self._communicator.rank)
            self._image = Image(self._communicator.rank, parts, pinned=self._communicator.device.type == "cuda")
        return self._image

    def blocks(self) -> list[Block]:
        """This rank's part of it, after an update or `restore`: views of the live tensors."""
        kinds: dict[str, Mapping[str, Tensor]] = {"model": self._trainer.weights.master}
        for moment in self._moments:
            kinds[moment] = {n: self._of(w)[moment] for n, w in self._trainer.weights.owned.items()}
        here = self._communicator.coordinates
        return [block for kind, tensors in kinds.items() for block in blocks(self._plan, kind, tensors, here)]

    def values(self) -> dict[str, Any]:
        """The optimizer's numbers, plain data: alike for all parameters. {} on a rank that has no parameter."""
        return {name: float(self._of(w)[name]) for w in list(self._trainer.weights.owned.values())[:1]
                for name in self._numbers}  # fmt: skip

    def restore(self, storage: Storage, directory: str, manifest: Manifest) -> None:
        """Goes on from a checkpoint of any plan; all ranks call it together. Raises as `platform.checkpoint.restore`,
        and the state is then undefined."""
        for w in self._trainer.weights.owned.values():
            state = self._of(w)
            state.clear()
            state.update({moment: torch.zeros_like(w, requires_grad=False) for moment in self._moments})
            for name, number in self._numbers.items():
                value = manifest.meta.values["optimizer"][name]
                state[name] = torch.full_like(number, value) if isinstance(number, Tensor) else type(number)(value)
        world = {"rank": self._communicator.rank, "world_size": self._plan.mesh.size}
        exchange = self._communicator.exchange
        restore(storage, directory, manifest, self.held, self.blocks(), **world, exchange=exchange)
        self._trainer.weights.refresh()

    def _of(self, w: Tensor) -> dict[str, Any]:
        return self._trainer.optimizer.state[w]
