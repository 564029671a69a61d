"""Keys of groups parallel, tensor, branch and pipeline: the axes of the mesh, and what they split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from platform.config.key import WORKERS, key, own_settings
from platform.plan.language.scheme import CONTEXT_KINDS, GATHERED, SLICE_VIA, TENSOR_EXPERTS

Rules = dict[str, dict[str, list[str]]]  # region or parameter role -> tensor dim -> mesh axes, major to minor


@dataclass
class Parallel:
    """Data parallelism and ZeRO."""

    data: int = key(
        1, "data-parallel replicas", most=WORKERS, constraint="must be >= 1, or -1 for as many as the workers give"
    )
    zero: int = key(
        0,
        "ZeRO shards over replicas: 1 = optimizer state, 2 = also gradients, 3 = also parameters; -1: the planner"
        " chooses",
        (0, 1, 2, 3),
    )
    zero_group: int = key(
        0,
        "replicas that share what ZeRO shards, such as all of a node: the largest divisor of parallel.data up to"
        " this; 0 = all replicas",
        ">= 0",
        most=WORKERS,
    )
    experts: int = key(
        1,
        "replicas that share the experts, next to each other; a run that re-forms takes the largest divisor of its"
        " replicas and of model.experts up to this; -1: the planner chooses",
        ">= 1",
        most=WORKERS,
    )
    context: int = key(
        1,
        "ranks that share each sequence, whose length they split, in attention too; a run that re-forms may take fewer;"
        " -1: the planner chooses",
        ">= 1",
        most=WORKERS,
    )
    context_kind: str = key("auto", "how attention sees keys and values of all of them", tuple(CONTEXT_KINDS))
    context_heads: int = key(
        0,
        "context_kind=nested, nested_ring: ranks of parallel.context, next to each other, that exchange heads",
        ">= 0",
        most=WORKERS,
    )
    context_balance: bool = key(
        True,
        "deal each sequence to ranks of parallel.context in pieces, of its beginning and of its end, so that causal"
        " attention is equal work for all; where lengths are multiples of twice the ranks",
    )
    context_pieces: int = key(
        0,
        "pieces that each rank gets, an even number; 0: two, and more where windows make work uneven (up to 32, of at"
        " least 128 tokens), or documents that are kept apart (up to 16, of at least 256)",
        ">= 0",
        most=1024,
    )
    tensor_experts: str = key(
        "split", "what tensor ranks do with experts; auto: the planner chooses", tuple(TENSOR_EXPERTS)
    )
    lent_experts: int = key(
        0,
        "experts of others that each of parallel.experts computes too, the busiest of the step before",
        ">= 0",
        most=2**16,
    )
    bucket_mib: int | str = key(
        "auto",
        "MiB of gradients that are summed over replicas at once, of whole blocks; 0 = each block by itself; auto = by"
        " the links, if cluster.hardware or cluster.gpu names them, else 25, and with zero=3 0",
        ">= 0",
        most=2**20,
        constraint="must be a number of MiB >= 0, or auto",
    )
    overlap: bool = key(
        True, "reduce gradients under backward passes, gather shards a block and weights a matrix ahead"
    )


@dataclass
class Tensor:
    """Tensor parallelism: a table from tensor dims to mesh axes."""

    scheme: str = key("serial", "name of the scheme: set by tensor=NAME; tensor=auto: the planner chooses")
    order: list[str] = key([], "axes of the scheme, outer to inner; [] = in order of mention")
    axes: dict[str, int] = key(
        {}, "size of each axis; an axis not given has size 1; -1: the planner chooses", ">= 1", most=WORKERS
    )
    regions: Rules = key({}, "activations: region -> dim -> axes")
    parameters: Rules = key({}, "parameters: role (all, in, out, vector) -> dim -> axes")
    gathered: str = key("keep", "gathered operands: keep, gather again in backward, or SUMMA's panels", tuple(GATHERED))
    uneven: bool = key(False, "dims that axes do not divide are cut into blocks that differ by one")
    layout: Any = key(None, "tensor=layout: your own map from dims to axes, one line or YAML")


@dataclass
class Branch:
    """Branch splitting (D&SP): a table of dims that are split over sub-grids."""

    kind: str = key("none", "name of the branch scheme: set by branch=NAME")
    axes: dict[str, int] = key({}, "size of each branch axis; an axis not given has size 1", ">= 1", most=WORKERS)
    order: str = key("inner", "place of its axes inside the mesh; outer = D&SP's naive order", ("inner", "outer"))
    append: dict[str, list[str]] = key({}, "region -> dims split by the branch axes last")
    prepend: dict[str, list[str]] = key({}, "region -> dims split by the branch axes first")
    only: list[str] = key([], "regions (and `parameters`) that exist on sub-grid 0 alone")
    slice_via: str = key(
        "all_to_all", "collective that slices heads; all_gather = as in SUPER (Jain et al.)", tuple(SLICE_VIA)
    )


@dataclass
class Pipeline:
    """Stages of the model, and the schedule of their microbatches."""

    kind: str = key(
        "none",
        "the schedule; pipeline=auto: the planner chooses",
        ("none", "gpipe", "1f1b", "interleaved", "zb_h1", "file"),
        open=True,
    )
    stages: int = key(1, "pipeline stages; -1: the planner chooses", ">= 1", most=1000)
    chunks: int = key(1, "model chunks per stage; -1: the planner chooses", ">= 1", most=1000)
    file: str = key("", "pipeline=file: path of the schedule's table, one line of actions per stage")
    scatter_gather: bool = key(True, "send 1/n of a tensor that n ranks replicate, and gather it after")
    settings: dict[str, Any] = own_settings("pipeline schedule")
