"""Adapters in checkpoints, which hold these alone: whose base is where (`BaseWeights`), and their products, to be added
to the base's weights as these are read (`StoredAdapters`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from torch import Tensor

from platform.boundary import schema
from platform.boundary.schema import Malformed
from platform.boundary.storage import Storage
from platform.checkpoint.blocks import Box, Piece
from platform.checkpoint.buffer import DTYPES
from platform.checkpoint.manifest import Manifest, Refused
from platform.checkpoint.moves import Fetch, read_tensor
from platform.config.fields import Config, Model
from platform.config.groups import Tune
from platform.model import build_model
from platform.model.tuning import find_adapters
from platform.plan.adapters import list_adapter_parameters
from platform.plan.model_types import Adapter, Parameter

BASE = "base"  # value of an adapter checkpoint's metadata: what its adapters are of


@dataclass(frozen=True)
class BaseWeights:
    """Weights that adapters are of: where they were, without secrets, and the hash of them (`InitialWeights.hash`)."""

    url: str
    hash: str


def read_base(manifest: Manifest) -> BaseWeights | None:
    """Return what the adapters of a checkpoint are of; None for one that holds whole weights. Raises Refused."""
    if (stored := manifest.meta.values.get(BASE)) is None:
        return None
    try:
        return schema.parse_value(BaseWeights, stored)
    except Malformed as error:
        raise Refused(f"its {BASE}: {error}") from None


def parse_stored_tune(identity: Mapping[str, Any]) -> Tune:
    """Return the keys of tune that a checkpoint's identity holds. Raises ConfigError."""
    values = {f.name: identity[f"tune.{f.name}"] for f in fields(Tune) if f"tune.{f.name}" in identity}
    return Config.from_dict({"tune": values}).tune


@dataclass(frozen=True)
class StoredAdapters:
    """Adapters of `model` in the checkpoint `directory` of a storage, by `tune`, its own."""

    storage: Storage
    directory: str
    manifest: Manifest
    model: Model
    tune: Tune

    @cached_property
    def adapters(self) -> dict[str, Adapter]:
        """Return the adapters by the name of what they adapt."""
        return find_adapters(self.model, self.tune, build_model(self.model))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and the global shape of each matrix of an adapter, as its checkpoint has it."""
        sizes = build_model(self.model).sizes
        matrices = list_adapter_parameters(self.adapters)
        return {f"model.{p.name}": tuple({**sizes, **dict(p.sizes)}[d] for d in p.dims) for p in matrices}

    @cached_property
    def _read(self) -> dict[str, Tensor]:
        """Read all matrices of the adapters, which are small. Raises Refused or OSError."""
        return {name: read_tensor(self.storage, self.directory, self.manifest, name).double() for name in self.shapes}

    def matrix(self, p: Parameter) -> Tensor:
        """Return one matrix of an adapter, in fp64. Raises Refused or OSError."""
        return self._read[f"model.{p.name}"]

    def compute_product(self, adapter: Adapter, box: Box) -> Tensor:
        """Return the block `box` of the product of an adapter, as its weight is laid out, in fp64."""
        cuts = [slice(a, a + n) for a, n in zip(box.offset, box.extent, strict=True)]
        stack, rows = adapter.up.num_stack_dims, adapter.up.num_row_dims
        up = self.matrix(adapter.up)[tuple(cuts[:rows])].flatten(stack, -2)
        down = self.matrix(adapter.down)[(*cuts[:stack], slice(None), *cuts[rows:])].flatten(stack + 1)
        return (up @ down).mul_(adapter.scale).reshape(box.extent)

    def merge_products(self, fetch: Fetch[Any]) -> Fetch[Any]:
        """Return a function that reads pieces of the base as `fetch` does, with the adapters' products added."""

        def fetch_merged(wanted: Sequence[Piece[Any]], into: Sequence[Tensor]) -> None:
            """Read pieces of the base's weights, and add to them what adapters make of each."""
            fetch(wanted, into)
            for piece, memory in zip(wanted, into, strict=True):
                if adapter := self.adapters.get(piece.name.removeprefix("model.")):
                    block = memory.view(DTYPES[piece.dtype]).view(piece.box.extent)
                    block.copy_(block.double() + self.compute_product(adapter, piece.box))

        return fetch_merged

    def describe_difference(self, others: Mapping[str, Adapter]) -> str:
        """Return in words the first weight of which a run has another adapter than these; "" if there is none."""
        mine = {name: (dict(a.down.sizes), a.scale) for name, a in self.adapters.items()}
        theirs = {name: (dict(a.down.sizes), a.scale) for name, a in others.items()}
        different = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        return f"{different[0]} has another one here, or none" if different else ""
