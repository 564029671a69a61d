"""StagePasses of one rank over sequences of one length: its part of the model, its data, executors of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from platform.config.fields import Config
from platform.config.ramps.length_ramp import at_length
from platform.data.corpus import Corpus
from platform.data.tokens.pieces import pieces_of
from platform.model import build_model
from platform.model.layers import Activations
from platform.model.losses import losses_of
from platform.parallel.communicator.base import Communicator
from platform.parallel.kernels.einsum import Deferred
from platform.parallel.parallel_ops import ParallelOps, PassPosition
from platform.parallel.pipeline import Accumulated, CompiledRows, Forward, PipelineExecutor, StageAlone
from platform.plan.core.chunks import Chunk
from platform.plan.core.plan import Plan
from platform.plan.language.functions import LABEL_WEIGHTS
from platform.plan.schedule.table import Action
from platform.train.step.inputs import Blocks, place, stretches
from platform.train.step.rank_parameters import DTYPES, Weights

PipelineOf = Callable[..., PipelineExecutor]  # `StagePasses.pipeline` or `StagePasses.alone`


class StagePasses:
    """Passes of the rank of `communicator` over microbatches whose sequences have one length. `stage`: the plan of this
    rank's stage; `pieces`: sequences that a sample of the corpus is cut into; `batch`: sequences of a microbatch of all
    replicas."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        communicator: Communicator,
        corpus: Corpus,
        weights: Weights,
        compiles: bool,
    ):
        """Prepare a rank's passes through its `weights` under `plan`, the plan of one length of sequences. `compiles`:
        True if the run compiles."""
        self.config, self.plan, self.communicator, self.corpus = config, plan, communicator, corpus
        self.stage = stage = plan.at(communicator.coordinates["stage"])
        self.pieces, self.batch = config.model.length // plan.sizes["length"], plan.sizes["batch"]
        self.model = build_model(at_length(config, plan.sizes["length"]).model)
        more = config.model.dropout, compiles, config.parallel.overlap
        self.ops = ParallelOps(stage, communicator, weights.read, *more)
        self.ops.residency, self.ops.losses = weights.residency, losses_of(config)
        self._weights = weights
        self._parts = {chunk.number: replace(stage, chunks=(chunk,)) for chunk in stage.chunks}
        self._compiled: CompiledRows = {}  # for the executors of all steps

    def pipeline(self, forward: Forward, accumulated: Accumulated = lambda action, done: None) -> PipelineExecutor:
        """Construct the executor of this stage's row of the schedule. `forward` runs a model chunk on a microbatch;
        `accumulated` is called after a backward action, with the chunk's number if it was that chunk's last, else
        None."""
        dtype = DTYPES[self.stage.precision][0]
        return PipelineExecutor(self.stage, self.communicator, dtype, forward, accumulated, self._compiled)

    def alone(self, forward: Forward, accumulated: Accumulated = lambda action, done: None) -> PipelineExecutor:
        """Construct an executor as `pipeline` does, but of this pipeline stage without neighbours, for a rehearsal."""
        return StageAlone(self.stage, self.communicator, DTYPES[self.stage.precision][0], forward, accumulated)

    def part(self, chunk: Chunk, flow: Activations, split: str, first: int, end: int) -> Activations:
        """Run a model chunk's forward pass on the microbatch (of all replicas together) that starts at sequence `first`
        of a global batch that ends before `end`, in the data's `split`; return its output activations or loss. `flow`:
        the activations from the previous chunk."""
        with self.communicator.clock.section("data"):
            inputs = self.load(split, first, end, chunk)
        residency, self.ops.label_weights = self._weights.residency, inputs.get(LABEL_WEIGHTS, {})
        self.ops.begin()
        if residency:
            residency.begin(chunk.number)
        if chunk.units:
            out = self.model.part(self.ops, inputs, flow, chunk.units)
        else:
            out = {"loss": self.model.forward(self.ops, inputs)}
        if residency:
            residency.turn(out)
        return out

    def load(self, split: str, first: int, end: int | None = None, chunk: Chunk | None = None) -> Blocks:
        """Load this rank's input blocks of the microbatch (of all replicas together) that starts at sequence `first` of
        the data's `split`. `chunk`: the model chunk whose operations read them, None for all of this stage; `end`:
        sequences from there on complete a partial batch, and are padding whose labels do not count."""

        def read(i: int, j: int) -> Mapping[str, Any]:
            """Read sequences [i, j) of the microbatch from the corpus, by data tensor; rows beyond `end` are padding,
            all -1."""
            stop = first + j if end is None else min(first + j, end)
            start = min(first + i, stop - 1)
            missing = first + j - stop if first + i < stop else j - i
            found = pieces_of(self.corpus, split, start, stop, self.pieces)
            if not missing:
                return found
            kept = {name: rows[: j - i - missing] for name, rows in found.items()}
            return {name: np.pad(rows, ((0, missing), (0, 0)), constant_values=-1) for name, rows in kept.items()}

        part = self._parts[chunk.number] if chunk else self.stage
        rows = {(i, j): read(i, j) for i, j in stretches(part, self.communicator)}
        return place(part, self.communicator, rows)

    @torch.no_grad()
    def evaluate(self, row: tuple[Action, ...], split: str, first: int, end: int, alone: bool = False) -> Tensor:
        """Run the forward pass of an evaluation, a stage's `row`, on the microbatch that starts at sample `first` of
        the data's `split` and ends before `end`. Return this rank's summed loss, an fp64 scalar. `alone`: without the
        other stages, for a rehearsal."""
        total = torch.zeros((), dtype=torch.float64, device=self.communicator.device)

        def forward(chunk: Chunk, _: int, flow: Activations, deferred: Deferred | None) -> Activations:
            """Run a model chunk on the evaluation's microbatch, and add its loss to the total; return its output."""
            self.ops.position = PassPosition(training=False)  # of this pass: its documents make its masks
            out = self.part(chunk, flow, split, first, end)
            total.add_(out.get("loss", 0.0))
            return out

        (self.alone if alone else self.pipeline)(forward).run(row)
        return total
