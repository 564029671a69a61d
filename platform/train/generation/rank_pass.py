"""Pass of generation on one rank: from the next tokens of all sequences to logits, through a key-value cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from platform.model.blocks import Activations
from platform.parallel.communicator.base import Communicator
from platform.parallel.kernels.einsum import Deferred
from platform.parallel.pass_ops import KeyValueCache, PassOps
from platform.parallel.pipeline import PipelineExecutor
from platform.parallel.sharding.convert import absent, convert
from platform.parallel.sharding.residency import Residency, ResidentSpan
from platform.plan.communication.rule import Conversion, relayout_steps
from platform.plan.core.buckets import common_name
from platform.plan.core.chunks import Chunk
from platform.plan.core.passes import HEAD, PassShape, pass_row, plan_pass
from platform.plan.core.plan import Plan
from platform.plan.language.layout import Layout
from platform.train.step.inputs import place
from platform.train.step.rank_parameters import DTYPES, Weights

Rows = Mapping[str, Tensor]  # data tensors of all sequences by name, int64 [batch, length]


class RankPass:
    """Passes of one `shape` on the rank of `communicator`, through the chunks of its pipeline stage; `weights`: this
    rank's, laid out as the run's `plan` says."""

    def __init__(self, plan: Plan, communicator: Communicator, weights: Weights, model: Any, shape: PassShape):
        self._communicator, self._model, self._shape = communicator, model, shape
        self._stage = communicator.coordinates["stage"]
        self._planned = found = plan_pass(plan, model, shape, self._stage)
        self._last = plan.chunks[-1].number
        self._body, self._head = (PassOps(p, communicator, weights.compute) for p in (found.body, found.head))
        if plan.storage:
            self._body.residency = self._head.residency = self._residency(weights)
        self._parts = {c.number: replace(found.body, chunks=(c,)) for c in found.body.chunks}
        self._row = pass_row(found.placement, self._stage)
        self._compiled: dict[Any, Any] = {}
        self._dtype = DTYPES[plan.precision][0]

    def _residency(self, weights: Weights) -> Residency:
        """Construct what gathers the parameters of each span of the pass, where they are stored in shards (ZeRO-3)."""
        flats = {p.name: flat for flat in weights.buckets for p in flat.bucket.parameters}
        head = tuple(p for spans in self._planned.head.chunks[-1].spans for p in spans)
        spans = {}
        for c in self._planned.body.chunks:
            names = [*c.spans[:-1], (*c.spans[-1], *(head if c.number == self._last else ()))]
            buckets = [list({id(flats[n]): flats[n] for n in some}.values()) for some in names]
            pairs = zip(names, buckets, strict=True)
            spans[c.number] = [ResidentSpan(common_name(some), found) for some, found in pairs]
        return Residency(self._communicator, spans, turns=False, ahead=True)

    @torch.no_grad()
    def run(self, rows: Rows, offset: int, cache: KeyValueCache) -> Tensor | None:
        """Return the logits [tokens asked, sequences of this rank, vocab] after the sequences' next tokens, on the last
        stage; None on others. `rows`: the data tensors of these tokens; `offset`: tokens in `cache`."""
        found: list[Tensor] = []

        def forward(chunk: Chunk, _: int, flow: Activations, deferred: Deferred | None) -> Activations:
            return self._run(chunk, flow, rows, found)

        self._body.enter(offset, cache)
        self._head.enter(offset + self._shape.tokens - self._shape.asked, cache)
        executor = PipelineExecutor(self._planned.body, self._communicator, self._dtype, forward, rows=self._compiled)
        executor.run(self._row)
        self._body.leave()
        self._head.leave()
        return found[0] if found else None

    def _run(self, chunk: Chunk, flow: Activations, rows: Rows, found: list[Tensor]) -> Activations:
        """Run a chunk on the activations `flow` from the chunk before, the head too if it is the last; that appends the
        logits to `found`."""
        inputs = place(self._parts[chunk.number], self._communicator, lambda i, j: {n: t[i:j] for n, t in rows.items()})
        residency = self._body.residency
        if residency:
            residency.begin(chunk.number)
        out = self._model.part(self._body, inputs, {**self._planned.told, **flow}, chunk.units)
        if chunk.number == self._last:
            stream = out["stream"]
            last = {"memory": None, "stream": stream if absent(stream) else stream[-self._shape.asked :]}
            found.append(self._rows_of(self._model.part(self._head, {}, last, (HEAD,))["logits"]))
        if residency:
            residency.end()
        return {name: x for name, x in out.items() if x is not None}

    def _rows_of(self, logits: Tensor) -> Tensor:
        """Gather the vocabulary of logits, whose sequences stay divided over ranks."""
        planner, spec = self._planned.head.planner, self._planned.logits
        source = planner.layout(spec)
        target = Layout.of({"batch": source["batch"]})
        steps = Conversion(relayout_steps(spec.dims, source, target), ())
        whole = convert(self._communicator, logits, planner.shaped(steps, spec, source, target).forward).wait()
        return whole[..., : self._planned.head.sizes["vocab"]]

    @property
    def sequences(self) -> tuple[int, int]:
        """Return the first of the sequences whose logits this rank has, and their number."""
        plan = self._planned.head
        axes = plan.layout(self._planned.logits)["batch"]
        count = self._shape.batch // plan.mesh.extent(axes)
        return self._communicator.index(axes) * count, count

    @property
    def speaks(self) -> bool:
        """Return True if this rank's logits are the ones that count: others may have the same."""
        plan, here = self._planned.head, self._communicator.coordinates
        axes = plan.layout(self._planned.logits)["batch"]
        last = here["stage"] == plan.chunks[-1].stage
        return last and not any(here[a] for a in plan.mesh.axes if a not in (*axes, "stage"))
