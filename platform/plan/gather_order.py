"""Gathers ahead: in which order the parameters of a chunk are converted for their operations, and how early that
starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Generic, NamedTuple, TypeVar

from platform.plan.chunks import Chunk
from platform.plan.model_types import Parameter
from platform.plan.operation_plan import PlannedOperation
from platform.plan.operations.registry import OPERATIONS
from platform.plan.plan import Plan
from platform.plan.rule import COLLECTIVES, Conversion

T = TypeVar("T")
Use = tuple[str, str, int]  # kind and name of an operation, number of its group of einsums
Converted = Sequence[tuple[Parameter, Conversion]]


class Fetch(NamedTuple):
    """Conversion of the parameters `converted` for one `use` of them, in span number `span` of a chunk's forward pass.
    `multiplies`: a matrix product follows, under which other conversions can hide; `again`: it is repeated in the
    backward pass."""

    use: Use
    span: int
    converted: Converted
    multiplies: bool
    again: bool


def find_fetches(chunk: Chunk) -> Iterator[Fetch]:
    """Yield the conversions (`Fetch`) of parameters that take collectives in the forward pass of a chunk, in its order.
    Parameters that SUMMA broadcasts in panels are left out, as is the bias of a loss's logits, which the matrix product
    itself adds."""
    span = 0
    for ((kind, name), planned), after in zip_longest(chunk.operations.items(), list(chunk.operations)[1:]):
        names = {p.name for p in planned.operation.parameters}
        span = next(i for i in range(span, len(chunk.spans)) if names.issubset(chunk.spans[i])) if names else span
        if after and kind == OPERATIONS[after[0]].bias_before:
            continue
        for number, converted, again in _conversions_by_group(planned):
            if any(step.op in COLLECTIVES for _, conversion in converted for step in conversion.forward):
                yield Fetch((kind, name, number), span, converted, bool(planned.groups), again)


def first_reads_by_span(chunk: Chunk) -> list[set[str]]:
    """Return the names of the parameters that each span of a model chunk's forward pass is the first to read.
    `ParameterPrefetcher` starts some conversions of a later span in it."""
    reads_by_span, first, order = [set(names) for names in chunk.spans], 0, list(find_fetches(chunk))
    for before, fetch in zip([None, *order], order, strict=False):
        if before is None or before.multiplies:  # the batch that begins here is started under the product before
            first = before.span if before else fetch.span
        reads_by_span[first] |= {p.name for p, _ in fetch.converted}
    return reads_by_span


def _conversions_by_group(planned: PlannedOperation) -> Iterator[tuple[int, Converted, bool]]:
    """Yield the parameters that an operation converts, by group of einsums if it has any, as (number of the group,
    parameters with their conversions, True if the backward pass converts them again)."""
    operation = planned.operation
    if not planned.groups:
        yield 0, list(zip(operation.parameters, planned.conversions, strict=False)), False
    for number, group in enumerate(planned.groups):
        operands = [(operation.inputs[1 + e.index], e.operand) for e in group.einsums]
        parameters = [(p, conversion) for p, conversion in operands if isinstance(p, Parameter)]
        if parameters and not group.panels:
            yield number, parameters, any(e.regathered for e in group.einsums)


class ParameterPrefetcher(Generic[T]):
    """Starts the conversions of parameters for the operations of a stage one matrix product ahead: while one product is
    computed, those for all operations up to the next product are under way, and in the backward pass, where they are
    converted again, those for the product before. All ranks of a stage run the same operations in the same order, and
    so start the same conversions at the same places.

    `start(parameter, conversion)` starts one and returns it under way; `on`: False starts each where it is used.
    `again`: a stretch of the forward pass is run again for recomputation: nothing beyond it is started. Where
    parameters are there span by span (`Plan.frees_weights`), or a block is compiled with its collectives, nothing
    beyond a span is started either.
    """

    def __init__(self, plan: Plan, start_gather: Callable[[Parameter, Conversion], T], on: bool = True):
        """Construct the starter of parameter gathers for all chunks of one stage's `plan`; arguments as in the
        class."""
        self._start, self._coming = start_gather, dict[tuple[Use, bool, bool], list[T]]()
        self.again = False
        chunks = [list(find_fetches(chunk)) for chunk in plan.chunks]
        # chunks may share one (relative positions)
        times = Counter(fetch.use for fetches in chunks for fetch in fetches)
        chunks = [[fetch for fetch in fetches if times[fetch.use] == 1] for fetches in chunks]
        self._converted: Mapping[Use, Converted] = {f.use: f.converted for fetches in chunks for f in fetches}
        stops_at_spans = plan.frees_weights or plan.compiles_collectives
        self._forward = _GatherOrder.plan_order(chunks, within_span=stops_at_spans, on=on)
        recomputes_blocks = (
            plan.recompute.kind == "full"
        )  # blocks; the inside of attention has no product of a parameter
        self._within = _GatherOrder.plan_order(chunks, within_span=True, on=on and recomputes_blocks)
        products = [[f for f in reversed(fetches) if f.again] for fetches in chunks]
        self._backward = _GatherOrder.plan_order(products, within_span=stops_at_spans or recomputes_blocks, on=on)

    def __contains__(self, use: Use) -> bool:
        """Return True if the plan has collectives convert parameters for `use`, an operation or group of einsums."""
        return use in self._converted

    def begin_pass(self) -> list[T]:
        """Begin a forward pass of the planned order of gathers; return, and forget, gathers that were never used."""
        unused = [gather for gathers in self._coming.values() for gather in gathers]
        self._coming.clear()
        return unused

    def take_parameters(self, use: Use, in_backward: bool = False) -> list[T]:
        """Return the parameters that the plan converts for a `use` that is due, in flight since an earlier matrix
        product or started now. `in_backward`: True in the backward pass."""
        self._start_gathers(self._order_of_pass(in_backward).together[use], in_backward)
        return self._coming.pop((use, in_backward, self.again))

    def start_next_gathers(self, use: Use, in_backward: bool = False) -> None:
        """Start the gathers that are planned beside the matrix product of `use`, whose own operands have arrived."""
        self._start_gathers(self._order_of_pass(in_backward).then.get(use, ()), in_backward)

    def _order_of_pass(self, in_backward: bool) -> _GatherOrder:
        """Return the plan's order of gathers for the backward pass, a recomputed stretch, or the forward pass."""
        return self._backward if in_backward else self._within if self.again else self._forward

    def _start_gathers(self, uses: Sequence[Use], in_backward: bool) -> None:
        """Start the planned gathers of parameters for `uses`, unless in flight; `in_backward`: in the backward pass."""
        for use in uses:
            if (key := (use, in_backward, self.again)) not in self._coming:  # a pass beside it may not run again
                self._coming[key] = [self._start(p, conversion) for p, conversion in self._converted[use]]


class _GatherOrder(NamedTuple):
    """Order of conversions in one direction: use -> the uses started with it if they are not under way, itself first;
    and use -> the uses started when it multiplies."""

    together: Mapping[Use, Sequence[Use]]
    then: Mapping[Use, Sequence[Use]]

    @classmethod
    def plan_order(cls, chunks: Sequence[Sequence[Fetch]], within_span: bool, on: bool) -> _GatherOrder:
        """Return the order in which parameters are gathered ahead of their use in several chunks. `within_span`: True
        to start nothing beyond the span of the model (a block) that is running; `on`: False to start each gather only
        where it is used."""
        if not on:
            return cls({f.use: (f.use,) for chunk_fetches in chunks for f in chunk_fetches}, {})
        together: dict[Use, Sequence[Use]] = {}
        then: dict[Use, Sequence[Use]] = {}
        for chunk_fetches in chunks:
            batches: list[list[Fetch]] = []
            for before, fetch in pairwise([None, *chunk_fetches]):
                assert fetch
                if before is None or before.multiplies or (within_span and before.span != fetch.span):
                    batches.append([])
                batches[-1].append(fetch)
            for batch in batches:
                together |= {f.use: tuple(g.use for g in batch[i:]) for i, f in enumerate(batch)}
            for batch, following in pairwise(batches):
                if batch[-1].multiplies and not (within_span and batch[-1].span != following[0].span):
                    then[batch[-1].use] = tuple(f.use for f in following)
        return cls(together, then)
