"""Tiers of the cluster that a node is in, such as zone, rack and switch, as its Ray labels and Slurm report them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

_ADDRESS, _PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
LONGEST = 100  # characters of a tier: names of switches may be lists
MOST = 16


def tiers_here(names: Sequence[str], labels: Mapping[str, str]) -> list[str]:
    """Return the tiers of the node that this process is on, outer to inner, as NAME=VALUE: the values of its Ray
    `labels` that have one of `names`, in their order ("" for one that it lacks), then the switches or blocks above it
    that Slurm has put into the environment: of s0.s4.node17, with the pattern switch.switch.node, ["switch=s0",
    "switch=s4"]."""
    kinds = os.environ.get(_PATTERN, "").split(".")[:-1]
    values = os.environ.get(_ADDRESS, "").split(".", len(kinds))[:-1]
    found = [*((name, labels.get(name, "")) for name in names), *zip(kinds, values, strict=False)]
    return [f"{name}={value}"[:LONGEST] for name, value in found][:MOST]
