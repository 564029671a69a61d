"""The plan: everything that the driver decides about a run, as data that workers execute and people read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from platform.plan.chunks import ADDS_WIDE, BUCKET_MIB, Bucket, Chunk, axes_of_replication, build_buckets, group_by_span
from platform.plan.gathered_tiles import GatheredTiles, find_gathered_tiles
from platform.plan.layout import Layout, Mesh, Stretch, is_at_index_zero, locate_block, pad_to_multiple
from platform.plan.model_types import (
    NF4,
    NF4_KINDS,
    NO_RECOMPUTATION,
    WIDE_STATES,
    Adapter,
    Operation,
    Parameter,
    Recompute,
    Spec,
    StoredStates,
)
from platform.plan.operation_plan import Collective, PlannedOperation, traffic_bytes
from platform.plan.operations.registry import OPERATIONS, Ops, count_flops
from platform.plan.planner import Planner
from platform.plan.quantisation import Quantisation
from platform.plan.rule import Conversion, RelayoutStep, relayout_steps
from platform.plan.scheme import Scheme

# precision -> bytes per element of each dtype class (`master`: parameters and optimizer state)
ITEMSIZE = {
    "fp64": {"compute": 8, "accumulate": 8, "master": 8},
    "fp32": {"compute": 4, "accumulate": 4, "master": 4},
    "bf16": {"compute": 2, "accumulate": 4, "master": 4},
    "fp16": {"compute": 2, "accumulate": 4, "master": 4},
}
# precision whose products are in 8 bits -> the one of all else, which is its plan's
BASE_PRECISION = {"fp8": "bf16", "mxfp8": "bf16"}


def base_precision(precision: str) -> str:
    """Return the precision of a plan, in which all is computed that is not in 8 bits."""
    return BASE_PRECISION.get(precision, precision)


ITEMSIZE |= {name: ITEMSIZE[base] for name, base in BASE_PRECISION.items()}

SCORED = ("scores", "context")  # what follows an attention's name in its two products' names, without a fused kernel


@dataclass(frozen=True)
class Plan:
    """Complete description of a run's parallel execution, or of one stage's part of it (`stage_part`), which workers
    execute and people read.

    `sizes`: global sizes in one microbatch of all replicas together (batch = microbatch x data), vocab as configured;
    the planner's have vocab padded. `sequences`, `microbatches`: per step. `reductions`: parameter name -> axes over
    which its gradient is summed once a step. `stages_of`: parameter name -> the stages that use it; the first owns it,
    the others of a tied parameter hold copies. `scatter_gather`: stages send 1/n of a tensor that n ranks of a stage
    replicate. `sharded`: axes over which master copies, reduced gradients and optimizer state are kept in shards:
    each bucket divides its gradients over the axes among them that sum these. `zero`: 1 to 3, how much is sharded, see
    `build_plan`; 0 without.
    `states`: parameters without gradient, which are not among `parameters`: no bucket, optimizer or norm knows them.
    `matrices`: names of the parameters whose updates are made of whole matrices, which are gathered for it (Muon).
    `factored`: names of the parameters of whose second moments a mean per row and per column is kept (Adafactor).
    `stored`: how the optimizer's states lie in memory between updates.
    `adapters`: by the name of what they adapt; their matrices are among `parameters`.
    `quantised`: names of frozen parameters that ranks keep in 4 bits, and have as numbers while a span reads them;
    `quantised_kind`: in which form, of NF4_KINDS.
    `mlp_chunks`: chunks of rows in which a rank computes a feed-forward layer.
    `compiles_collectives`: blocks are compiled whole though collectives lie in them.
    `bucket_mib`: most MiB of gradients, as they are summed, in a bucket, unless one span of the model has more.
    `gathers_tiles`: ZeRO-3 gathers weights in 8 bits where it can.
    `turns`: every backward pass follows its forward pass at once, so that what both need can be kept.
    `pairs_passes`: a forward pass runs at once with the backward pass of an earlier microbatch, under whose computation
    it waits for its exchanges, and the other way around.
    `shorter`: plans of steps with shorter sequences (train.length_ramp), by length: the same ranks hold the same
    parameters, and activations have other shapes.
    """

    planner: Planner
    precision: str
    microbatches: int
    sequences: int
    sizes: Mapping[str, int]
    parameters: tuple[Parameter, ...]
    reductions: Mapping[str, tuple[str, ...]]
    stages_of: Mapping[str, tuple[int, ...]]
    chunks: tuple[Chunk, ...]
    states: tuple[Parameter, ...] = ()
    sharded: tuple[str, ...] = ()
    zero: int = 0
    matrices: tuple[str, ...] = ()
    factored: tuple[str, ...] = ()
    stored: StoredStates = WIDE_STATES
    turns: bool = False
    scatter_gather: bool = True
    recompute: Recompute = NO_RECOMPUTATION
    mlp_chunks: int = 1
    compiles_collectives: bool = False
    bucket_mib: int = BUCKET_MIB
    gathers_tiles: bool = False
    warnings: tuple[str, ...] = ()
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    quantised: tuple[str, ...] = ()
    quantised_kind: str = NF4
    pairs_passes: bool = False
    shorter: Mapping[int, Plan] = field(default_factory=dict)

    @cached_property
    def operations(self) -> dict[tuple[str, str], PlannedOperation]:
        """Map (kind, name) to the planned operations of all chunks, in model order. Chunks that share one (relative
        positions) plan it alike."""
        return {key: o for chunk in self.chunks for key, o in chunk.operations.items()}

    @cached_property
    def multi_use_parameters(self) -> frozenset[str]:
        """Return the names of parameters that several operations of a chunk use, each adding to the gradient."""
        return frozenset(name for chunk in self.chunks for name in chunk.multi_use_parameters)

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Return the names of the parameters that no update changes, which have neither gradients nor moments."""
        return frozenset(p.name for p in self.parameters if self.planner.is_frozen(p))

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages."""
        return self.mesh.axes["stage"]

    def stage_part(self, stage: int) -> Plan:
        """Return the part of the plan that one pipeline stage executes: its chunks and their parameters."""
        if stage not in self._stage_parts:
            self._stage_parts[stage] = self._build_stage_part(stage)
        return self._stage_parts[stage]

    @cached_property
    def _stage_parts(self) -> dict[int, Plan]:
        """Return the parts of the plan that have been asked for, by stage; each makes its buckets once."""
        return {}

    def _build_stage_part(self, stage: int) -> Plan:
        """Make the part of the plan that one pipeline stage executes."""
        chunks = tuple(c for c in self.chunks if c.stage == stage)
        parameters, states = map(tuple, self._tensors_by_stage.get(stage, ((), ())))
        return replace(self, chunks=chunks, parameters=parameters, states=states, shorter={})

    @cached_property
    def _tensors_by_stage(self) -> Mapping[int, tuple[list[Parameter], list[Parameter]]]:
        """Return by stage the parameters and the states that it uses, in order."""
        by_stage: dict[int, tuple[list[Parameter], list[Parameter]]] = {}
        for kind, tensors in enumerate((self.parameters, self.states)):
            for p in tensors:
                for stage in self.stages_of[p.name]:
                    by_stage.setdefault(stage, ([], []))[kind].append(p)
        return by_stage

    def plan_of_length(self, length: int) -> Plan:
        """Return the plan of steps whose sequences have `length` tokens."""
        return self.shorter.get(length, self)

    @property
    def plans_of_lengths(self) -> list[Plan]:
        """Return the plans of all lengths of a run's sequences, ascending; the last is this one."""
        return [*(self.shorter[length] for length in sorted(self.shorter)), self]

    @cached_property
    def load_dependent_routes(self) -> dict[str, PlannedOperation]:
        """Map the name of each layer with states or lent experts to its routing, whose load changes these."""
        routes = {name: o for (kind, name), o in self.operations.items() if kind == Ops.route.kind}
        return {name: o for name, o in routes.items() if o.operation.states or self.scheme.lent}

    @cached_property
    def attention_operations(self) -> list[PlannedOperation]:
        """Return the operations in which queries see keys: one kernel, a ring, or a softmax between two products."""
        return [o for (kind, _), o in self.operations.items() if OPERATIONS[kind].keys_input >= 0]

    @cached_property
    def stages_of_tied_parameters(self) -> dict[str, tuple[int, ...]]:
        """Map the name of each tied parameter to the stages that use it and sum its gradient once a step."""
        shared = {p.name: self.stages_of[p.name] for p in self.parameters if len(self.stages_of[p.name]) > 1}
        return {name: stages for name, stages in shared.items() if name not in self.frozen}

    @cached_property
    def neighbour_stages(self) -> list[tuple[int, int]]:
        """Return the pairs of pipeline stages, lower first, that exchange activations or tied parameters' gradients."""
        pairs = [(a.stage, b.stage) for a, b in zip(self.chunks, self.chunks[1:], strict=False)]
        pairs += [(owner, other) for owner, *others in self.stages_of_tied_parameters.values() for other in others]
        return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})

    def scatter_axes(self, spec: Spec) -> tuple[str, ...]:
        """Return the mesh axes over which an activation is scattered before it is sent to another pipeline stage, and
        gathered there (scatter/gather optimization); () if it is sent whole."""
        return axes_of_replication(self.layout(spec), self.mesh) if self.scatter_gather else ()

    def sent_elements(self, spec: Spec) -> int:
        """Return the elements that each rank sends of one activation, or of its gradient, to another stage."""
        return self.elements_per_part(spec, self.scatter_axes(spec))

    def recompute_axes(self, spec: Spec) -> tuple[str, ...]:
        """Return the mesh axes whose ranks replicate an activation, so that each keeps an equal part of it until the
        backward pass recomputes from it."""
        return axes_of_replication(self.layout(spec), self.mesh)

    def elements_per_part(self, spec: Spec, axes: tuple[str, ...]) -> int:
        """Return the elements of one rank's part of an activation's local block, divided over `axes` with padding."""
        n = self.mesh.count_ranks(axes)
        return pad_to_multiple(prod(self.local_shape(spec)), n) // n

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of ranks that the plan is for."""
        return self.planner.mesh

    @property
    def num_replicas(self) -> int:
        """Return the number of data-parallel replicas, which compute different sequences with the same weights."""
        return self.planner.num_replicas

    @property
    def scheme(self) -> Scheme:
        """Return the scheme that gives the layouts of all activations and parameters."""
        return self.planner.scheme

    @property
    def region_layouts(self) -> dict[str, Layout]:
        """Map the regions that the model has to their layouts: all, but experts where it has none."""
        return {r: layout for r, layout in self.scheme.regions.items() if r != "experts" or r in self.sizes}

    def layout(self, tensor: Spec | Parameter) -> Layout:
        """Return the layout of an activation or parameter under the plan's scheme: which mesh axes split which dim."""
        return self.planner.layout(tensor)

    def local_shape(self, tensor: Spec | Parameter) -> tuple[int, ...]:
        """Return the shape of the longest block of a tensor, vocab padded: of every block but for uneven ones."""
        return self.planner.local_shape(tensor)

    def stretches_of_rank(self, tensor: Spec | Parameter, dim: str, coordinates: Mapping[str, int]) -> list[Stretch]:
        """Return the consecutive positions along `dim` of a tensor that the rank at `coordinates` holds, in order."""
        sizes, layout = self.planner.tensor_sizes(tensor), self.layout(tensor)
        return self.planner.stretches_of_rank(dim, sizes[dim], layout, coordinates)

    def block_shape(self, tensor: Spec | Parameter, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the block of a tensor that the rank at `coordinates` holds, vocab padded."""
        return tuple(extent for _, extent in self.locate_block(tensor, coordinates))

    @cached_property
    def uneven_parameters(self) -> frozenset[str]:
        """Return the names of the parameters whose blocks differ in shape from rank to rank."""
        return frozenset(p.name for p in self.parameters if self.planner.find_cuts(p, self.layout(p)))

    def bucket_of_rank(self, bucket: Bucket, coordinates: Mapping[str, int]) -> Bucket:
        """Return a bucket as the rank at `coordinates` has it, in a buffer that has room for the longest blocks: its
        blocks follow each other or, if ranks divide the buffer, begin where the longest would, so that replicas divide
        them alike."""
        if self.uneven_parameters.isdisjoint(p.name for p in bucket.parameters):
            return bucket
        block_sizes = tuple(prod(self.block_shape(p, coordinates)) for p in bucket.parameters)
        return replace(bucket, held=block_sizes) if bucket.sharded else replace(bucket, sizes=block_sizes)

    def has_block(self, tensor: Spec | Parameter, coordinates: Mapping[str, int]) -> bool:
        """Return True if the rank at `coordinates` has a block of an activation or parameter: some tensors exist on
        sub-grid 0 of a D&SP branch splitting alone, and parameters only on the stages that use them."""
        is_on_stage = not isinstance(tensor, Parameter) or coordinates["stage"] in self.stages_of[tensor.name]
        return is_on_stage and self.layout(tensor).has_block(coordinates)

    def locate_block(self, tensor: Spec | Parameter, coordinates: Mapping[str, int]) -> list[tuple[int, int]]:
        """Return (offset, extent) along every dim of the block of a global tensor that the rank at `coordinates` holds;
        the last block of vocab may reach into padding."""
        sizes, units = self.planner.tensor_sizes(tensor), self.planner.cut_units
        return locate_block(tensor.dims, sizes, self.layout(tensor), self.mesh, coordinates, units)

    def shard_range(self, p: Parameter, coordinates: Mapping[str, int]) -> tuple[int, int]:
        """Return (start, stop) within the flattened local block of parameter `p` of the elements whose master copy and
        optimizer state the rank at `coordinates` keeps: the whole block without ZeRO, else its part in the rank's shard
        of the bucket (start equals stop if there is none)."""
        bucket = self.bucket_of_rank(self.bucket_by_parameter[p.name], coordinates)
        return bucket.range_in_shard(p.name, self.mesh.index_in_group(coordinates, bucket.sharded))

    def master_split_axes(self, p: Parameter) -> tuple[str, ...]:
        """Return the mesh axes along which ranks hold different parts of the master copy of parameter `p`."""
        layout = self.layout(p)
        return (*layout.axes, *layout.shifted_axes, *self.bucket_by_parameter[p.name].sharded)

    def global_shape(self, tensor: Spec | Parameter) -> tuple[int, ...]:
        """Return the global shape of an activation or parameter as the model declares it: vocab without padding."""
        return tuple({**self.sizes, **dict(tensor.sizes)}[d] for d in tensor.dims)

    @cached_property
    def itemsize(self) -> dict[str, int]:
        """Return the bytes per element of the plan's precision, by dtype class: compute, accumulate, master."""
        return ITEMSIZE[self.precision]

    @cached_property
    def scaled(self) -> frozenset[str]:
        """Return the names of the parameters whose moments are kept in 8 bits, with a scale for each block of them."""
        trained = (p for p in self.parameters if p.name not in self.frozen)
        return frozenset(p.name for p in trained if self.stored.has_scales(prod(self.global_shape(p))))

    @cached_property
    def has_scaled_products(self) -> bool:
        """Return True if the plan has products in 8 bits."""
        return self.quantisation is not None

    @cached_property
    def quantisation(self) -> Quantisation | None:
        """Return how operands of the plan's products are in 8 bits; None if it has no such products."""
        groups = (group for o in self.operations.values() for group in o.groups)
        return next((e.scaled.how for group in groups for e in group.einsums if e.scaled), None)

    @property
    def frees_weights(self) -> bool:
        """Return True if ranks have some weights while a span of the model reads them alone, see `Bucket`."""
        return self.zero == 3 or bool(self.quantised)

    def cuts_blocks(self, p: Parameter, block: int) -> bool:
        """Return True if ranks' blocks of a parameter begin or end inside a `block` of elements with one scale."""
        shape, padded = self.global_shape(p), [self.planner.tensor_sizes(p)[d] for d in p.dims]
        if list(shape[1:]) != padded[1:]:
            return True
        last = max((i for i, d in enumerate(p.dims) if self.mesh.count_ranks(self.layout(p)[d]) > 1), default=0)
        ranks = range(self.mesh.world_size if p.name in self.uneven_parameters else 1)
        extents = {self.block_shape(p, self.mesh.rank_coordinates(rank))[last] for rank in ranks}
        return any(n * prod(shape[last + 1 :]) % block for n in extents)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Return the buckets of all parameters: stage by stage, in order of their first use in its forward pass, the
        bucket of a tied parameter once. They are the same whether this is the whole plan or a stage's part of it."""
        first, *others = dict.fromkeys(c.stage for c in self.chunks)
        if not others:
            return self._build_stage_buckets(first)
        return list(dict.fromkeys(bucket for stage in (first, *others) for bucket in self.stage_part(stage).buckets))

    def _build_stage_buckets(self, stage: int) -> list[Bucket]:
        """Make the buckets of the parameters that one stage uses, in order of their first use there. A bucket has those
        of a span of the model (a block, or what lies between blocks) or, up to `bucket_mib`, of several, but for those
        in 4 bits; a parameter that several spans use has its own."""
        spans = [((c.number, i), names) for c in self.chunks if c.stage == stage for i, names in enumerate(c.spans)]
        used_names = {name for _, names in spans for name in names}
        declared = {p.name: p for p in self.parameters if p.name in used_names}
        uses = [(span, n) for span, names in spans for n in names if n in declared]
        shared = [name for name in declared if len(self.stages_of[name]) > 1]
        groups = [(k, [declared[n] for n in names]) for k, names in group_by_span(uses, shared)]
        reduced = {name: (self.reductions[name], self.layout(p).only) for name, p in declared.items()}
        sizes = {name: prod(self.local_shape(p)) for name, p in declared.items()}
        limit = (self.bucket_mib << 20) // self.itemsize["master"]
        shards = {a: self.mesh.axes[a] for a in self.sharded}
        kinds, tiles = (self.scaled, self.frozen), self.find_gathered_tiles(stage).tiles if self.gathers_tiles else {}
        bits = dict.fromkeys(tiles, 8) | dict.fromkeys(self.quantised, 4)
        plain, in_8_bits, in_4_bits = (
            [(k, [p for p in ps if bits.get(p.name, 16) == number]) for k, ps in groups] for number in (16, 8, 4)
        )
        return [
            *build_buckets(plain, reduced, sizes, shards, self.zero, limit, *kinds),
            *build_buckets(in_8_bits, reduced, sizes, shards, self.zero, limit, *kinds, tiles=tiles),
            *build_buckets(in_4_bits, reduced, sizes, shards, self.zero, 0, *kinds, NF4_KINDS[self.quantised_kind]),
        ]

    def find_gathered_tiles(self, stage: int) -> GatheredTiles:
        """Return in which tiles ZeRO-3 can gather weights of a stage in 8 bits, and why not others of its products."""
        if self.zero != 3:
            return GatheredTiles({}, {})
        chunks = (c.operations for c in self.chunks if c.stage == stage)
        parameters = {p.name: p for p in self.parameters if p.name not in self.quantised}
        apart = {name for name, stages in self.stages_of.items() if len(stages) > 1} | {*self.uneven_parameters}
        return find_gathered_tiles(self.planner, [o for c in chunks for o in c.values()], parameters, apart)

    @cached_property
    def bucket_by_parameter(self) -> dict[str, Bucket]:
        """Map the name of every parameter to its bucket."""
        return {p.name: bucket for bucket in self.buckets for p in bucket.parameters}

    def reduction_steps(self, bucket: Bucket) -> tuple[list[RelayoutStep], list[RelayoutStep]]:
        """Return two lists of collective steps that sum a bucket's gradients over ranks, laid out as [shards, elements
        of a shard]: the steps of each microbatch (ZeRO-2 and 3, else none), and the steps at the end of the training
        step. A reduce-scatter comes before an all-reduce, the order that moves the fewest bytes."""
        if bucket.frozen:
            return [], []
        summed_axes = tuple(a for a in bucket.axes if a not in bucket.sharded)
        scatter = [RelayoutStep("reduce_scatter", bucket.sharded, only=bucket.only)] if bucket.sharded else []
        add = [RelayoutStep("all_reduce", summed_axes, only=bucket.only)] if summed_axes else []
        return (scatter, add) if bucket.zero >= 2 else ([], scatter + add)

    def adds_gradients_into_sums(self, bucket: Bucket, device: str) -> bool:
        """Return True if kernels on a kind of `device` add gradients straight to the sums of a bucket."""
        return bucket.zero >= 2 or self.itemsize["master"] == self.itemsize["compute"] or ADDS_WIDE[device]

    def gather_steps(self, bucket: Bucket) -> list[RelayoutStep]:
        """Return the collective steps that gather a bucket's parameters from their ZeRO shards on all ranks."""
        return [RelayoutStep("all_gather", bucket.sharded, only=bucket.only)] if bucket.sharded else []

    def matrix_gather_steps(self, p: Parameter) -> tuple[RelayoutStep, ...]:
        """Return the collective steps that gather a parameter's blocks into whole matrices, to update these."""
        steps = Conversion(relayout_steps(p.dims, self.layout(p), self.matrix_layout(p)))
        return self.planner.fill_shapes(steps, p, self.layout(p), self.matrix_layout(p)).forward

    def matrix_layout(self, p: Parameter) -> Layout:
        """Return the layout in which each rank has whole matrices of a parameter: of experts its own."""
        return self.layout(p).restrict_dims(p.dims[: p.num_stack_dims])

    @cached_property
    def buckets_by_chunk_span(self) -> dict[int, list[tuple[Bucket, ...]]]:
        """Map the number of each chunk to the buckets whose parameters each span of its forward pass reads."""
        order = {id(bucket): i for i, bucket in enumerate(self.buckets)}
        by_span = {c.number: [{id(b): b for b in map(self.bucket_by_parameter.get, names) if b} for names in c.spans]
                   for c in self.chunks}  # fmt: skip
        return {
            number: [tuple(sorted(span_buckets.values(), key=lambda b: order[id(b)])) for span_buckets in spans]
            for number, spans in by_span.items()
        }

    @cached_property
    def parameter_count(self) -> int:
        """Return the number of elements of all parameters that the plan or its stage has, each counted once."""
        return sum(prod(self.global_shape(p)) for p in self.parameters)

    @cached_property
    def local_parameter_count(self) -> int:
        """Return the most parameter elements that any worker keeps between uses."""
        places = ({**at, "stage": c.stage} for at in self.sub_grid_coordinates for c in self.chunks)
        return max(map(self.count_parameters_of_rank, places))

    @cached_property
    def sub_grid_coordinates(self) -> list[dict[str, int]]:
        """Return the coordinates of a worker of each sub-grid, where unlike branches are dealt to them, or of one."""
        axes = self.planner.branch_axes if any(p.place for p in self.parameters) else ()
        return [self.mesh.rank_coordinates(rank) for rank in self.mesh.group_of_rank(0, axes)]

    def count_parameters_of_rank(self, coordinates: Mapping[str, int]) -> int:
        """Return how many parameter elements the worker at `coordinates` keeps between uses, as compute copies."""
        return sum(b.shard_elements if b.frees_weights else b.elements for b in self.buckets_of_rank(coordinates))

    def count_masters_of_rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the number of elements whose master copy and optimizer state the worker at `coordinates` keeps."""
        return sum(b.shard_elements for b in self.buckets_of_rank(coordinates) if not b.frozen)

    def count_masters_of_parameters(self, names: Sequence[str], coordinates: Mapping[str, int]) -> int:
        """Return how many elements of the parameters `names` the worker at `coordinates` keeps as master copies."""
        return sum(n for name, n in self.count_own_masters(coordinates).items() if name in names) if names else 0

    def count_saved_state_bytes(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes that the moments of so many elements of parameters, by name, take less than as masters."""
        trained = {name: n for name, n in sizes.items() if name not in self.frozen}
        scaled = sum(n for name, n in trained.items() if name in self.scaled)
        return self.stored.count_saved_bytes(sum(trained.values()), scaled, self.itemsize["master"])

    def count_own_masters(self, coordinates: Mapping[str, int]) -> dict[str, int]:
        """Return how many elements of each parameter the worker at `coordinates` keeps as master copies."""
        local = (p for p in self.stage_part(coordinates["stage"]).parameters if self.has_block(p, coordinates))
        ranges = ((p.name, self.shard_range(p, coordinates)) for p in local)
        return {name: max(0, stop - start) for name, (start, stop) in ranges}

    def buckets_of_rank(self, coordinates: Mapping[str, int]) -> list[Bucket]:
        """Return the buckets of which the worker at `coordinates` has a part."""
        return [b for b in self.stage_part(coordinates["stage"]).buckets if is_at_index_zero(b.only, coordinates)]

    @cached_property
    def coordinates_off_sub_grid(self) -> dict[str, int] | None:
        """Return the mesh coordinates of an example worker outside of sub-grid 0, which holds less than others where
        D&SP-cSub keeps the common layers of a model on sub-grid 0 alone (index 0 along the branch axes); None if every
        worker of a stage has a block of all its tensors."""
        only = self.scheme.sub_grid_zero_axes
        return {a: int(a in only) for a in self.mesh.axes} if only else None

    @cached_property
    def tokens_per_step(self) -> int:
        """Return the tokens of one training step: sequences per step times their length."""
        return self.sequences * self.sizes["length"]

    @cached_property
    def flops_per_token(self) -> float:
        """Return the model FLOPs per token of forward and backward, for model FLOPs utilisation: three times every
        einsum, twice one with frozen weights, no recomputation, attention not halved for its causal mask (6N + 12
        layers d_model length, N the parameters of the einsums), but over its window alone, where it has one."""
        seen = ((3 - o.is_frozen, self.count_seen_flops(o.operation)) for o in self.operations.values())
        return sum(n * forward for n, forward in seen) / (self.sizes["batch"] * self.sizes["length"])

    def count_seen_flops(self, operation: Operation) -> float:
        """Return the forward FLOPs of an operation on all ranks together; of attention, over its window alone."""
        name, _, part = operation.name.rpartition(".")
        window = self._windows.get(name if part in SCORED else operation.name, 0) or self.sizes["length"]
        return count_flops(operation, self.sizes) * min(1.0, window / self.sizes["length"])

    @cached_property
    def _windows(self) -> dict[str, int]:
        """Return the window of each attention that has one, by name."""
        attributes = ((o.operation.name, dict(o.operation.attributes)) for o in self.operations.values())
        return {name: more["window"] for name, more in attributes if more.get("window")}

    @cached_property
    def reader_layouts(self) -> dict[str, dict[tuple[str, str], Layout]]:
        """Map each data tensor (token ids, labels, their weights, masks) to the operations that read it, (kind, name)
        -> layout over batch and length in which the operation reads it."""
        layouts: dict[str, dict[tuple[str, str], Layout]] = defaultdict(dict)
        for key, o in self.operations.items():
            for name in o.operation.reads:
                layouts[name][key] = o.tokens
        return dict(layouts)

    @cached_property
    def depths_ahead(self) -> int:
        """Return the number of losses of multi-token prediction beside the loss of the model's own head."""
        return len({o.operation.name for (kind, _), o in self.operations.items() if OPERATIONS[kind].is_loss}) - 1

    @cached_property
    def loss_layout(self) -> Layout:
        """Return the layout of the loss: ranks along its axes have losses of different tokens, which add up."""
        return next(o.tokens for (kind, _), o in self.operations.items() if OPERATIONS[kind].is_loss)

    def traffic_bytes(self, c: Collective) -> int:
        """Return the bytes that all workers of one stage move in one launch of the collective `c`; of all stages
        together if `c` spans them."""
        everywhere = traffic_bytes(c, self.mesh, self.itemsize)
        return everywhere if "stage" in c.axes and c.op != "send" else everywhere // self.num_stages
