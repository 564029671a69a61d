"""Ranges of numbers over the ranks of a step: how far workers differ, and which ranks are at the ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

import torch
from torch import Tensor

from platform.plan.language.mesh import Mesh
from platform.train.protocol.replies import RankRange

LEAST_WAIT = 0.01  # share of a step, below which waiting shows no bandwidth


def rank_ranges(names: Sequence[str], numbers: Tensor) -> dict[str, RankRange]:
    """Return the range over the ranks of each of the `numbers` [ranks, names], by name; NaN is unknown."""
    unknown = numbers.isnan()
    least, least_rank = numbers.masked_fill(unknown, torch.inf).min(0)
    most, most_rank = numbers.masked_fill(unknown, -torch.inf).max(0)
    middle = numbers.nanquantile(0.5, 0)
    found = zip(names, *(x.tolist() for x in (least, middle, most, least_rank, most_rank)), strict=True)
    return {name: RankRange(*spread) for name, *spread in found if not isnan(spread[1])}


class Bandwidths:
    """Bandwidths of ranks in collectives, by tier of the cluster. `keys`, `waits`: collectives (OP/AXES) and axes, as
    the columns of a step's bytes and seconds of waiting have them; `reach`: axes -> the widest tier that their groups
    span."""

    def __init__(self, mesh: Mesh, keys: Sequence[str], waits: Sequence[str], reach: Mapping[str, str]):
        """Prepare to compute the bandwidths of the ranks of a mesh."""
        along, known = [key.partition("/")[2] for key in keys], [axes for axes in waits if axes in reach]
        self.tiers = list(dict.fromkeys(reach[axes] for axes in known))
        self._sent, self._waited = (
            torch.tensor([[axes in known and reach[axes] == tier for tier in self.tiers] for axes in some]).double()
            for some in (along, waits)
        )
        places = enumerate(along)
        self._groups = [(i, torch.tensor(mesh.groups(axes.split("+")))) for i, axes in places if axes in known]

    def of_step(self, moved: Tensor, waits: Tensor, seconds: Tensor) -> Tensor:
        """Return the bytes per second [ranks, tiers] that each rank sent in a step's collectives while it waited for
        them, NaN where it hardly waited. `moved` [ranks, keys]: bytes of a group, at its first rank; `waits` [ranks,
        axes]: seconds of waiting; `seconds` [ranks]: of the step."""
        if not self.tiers:
            return moved.new_empty(len(moved), 0)
        sent = torch.zeros_like(moved)
        for column, groups in self._groups:
            sent[groups, column] = moved[groups, column].sum(1, keepdim=True) / groups.shape[1]
        waited = waits @ self._waited
        rate = sent @ self._sent / waited
        return rate.masked_fill(waited < LEAST_WAIT * seconds[:, None], torch.nan)
