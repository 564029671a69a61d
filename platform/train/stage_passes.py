"""Passes of one rank over sequences of one length (`StagePasses`): its part of the model, its data, executors of rows.
Each rank itself reads the input block that each of its operations needs (`stretches`, `place`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.data.corpus import Corpus
from platform.data.streams import read_ahead, read_sequence_batch
from platform.data.teacher_classes import TeacherClasses
from platform.model.layers import Activations
from platform.plan.chunks import Chunk
from platform.plan.layout import Layout, locate_block
from platform.plan.model_types import LABEL_WEIGHTS, PAIRED, TEACHER, label_tensor
from platform.plan.plan import Plan
from platform.plan.schedule import Action
from platform.runtime.attention_pairs import note_host_copy
from platform.runtime.communicator import Communicator
from platform.runtime.einsum import Deferred
from platform.runtime.parallel_ops import PassPosition
from platform.runtime.pipeline import Accumulated, CompiledRows, Forward, PipelineExecutor, StageAlone
from platform.train.pass_recorder import PassRecorder
from platform.train.rank_model import Rank
from platform.train.rank_parameters import DTYPES

Blocks = dict[str, dict[tuple[str, str], Tensor]]  # data tensor -> operation that reads it -> [length, batch]
Stretch = tuple[int, int]  # of a microbatch's sequences: the number of the first one, and that behind the last one


def stretches(plan: Plan, communicator: Communicator) -> list[Stretch]:
    """Return the ranges [first, end) of a microbatch's sequences that this rank has to read from the data."""
    layouts = dict.fromkeys(layout for readers in plan.reader_layouts.values() for layout in readers.values())
    present_layouts = (layout for layout in layouts if layout.has_block(communicator.coordinates))
    return list(dict.fromkeys(_find_sequence_range(plan, communicator, layout) for layout in present_layouts))


def _find_sequence_range(plan: Plan, communicator: Communicator, layout: Layout) -> Stretch:
    """Return the range [first, end) of a microbatch's sequences in this rank's block of data in this layout."""
    ((start, n),) = locate_block(("batch",), plan.sizes, layout, plan.mesh, communicator.coordinates)
    return start, start + n


def place(
    plan: Plan,
    communicator: Communicator,
    rows: Mapping[Stretch, Mapping[str, Any]],
    teacher: TeacherClasses | None = None,
) -> Blocks:
    """Cut this rank's input blocks of a microbatch out of the sequences it has read, one for each operation that reads
    a data tensor: return data tensor -> operation -> block.

    `rows`: range of sequences, from `stretches` -> every data tensor, by name: int64 [sequences, length], weights fp64.
    Blocks are [length, batch], local; equal ones are shared; an operation that only other ranks compute gets an empty
    block. Of the numbers of a `teacher`'s records the block has the records, [length, batch, 2 classes].
    """

    def cut_block(name: str, layout: Layout) -> Tensor:
        """Return this rank's block [length, batch] of the microbatch's data tensor `name` in this layout, on its
        device."""
        if not layout.has_block(communicator.coordinates):
            return torch.empty(0, dtype=torch.int64, device=communicator.device)
        # of an array, or of a pass of generation a tensor
        sequences = rows[_find_sequence_range(plan, communicator, layout)][name]
        spans = plan.planner.stretches_of_rank("length", sequences.shape[1], layout, communicator.coordinates)
        parts = [sequences[:, first : first + n] for first, n in spans]
        on_host = np.concatenate(parts, 1).T if isinstance(sequences, np.ndarray) else torch.cat(parts, 1).t()
        if name == TEACHER and teacher:
            on_host = teacher.read_classes(np.asarray(on_host))
        host_block = torch.as_tensor(on_host).contiguous()
        # from pageable memory the copy would hold the host
        pinned_block = host_block.pin_memory() if communicator.device.type == "cuda" else host_block
        device_block = pinned_block.to(communicator.device, non_blocking=True)
        if name == "begins" and device_block.device.type != "cpu":
            note_host_copy(device_block, on_host)
        return device_block

    input_blocks: Blocks = {}
    for name, readers in plan.reader_layouts.items():
        blocks = {layout: cut_block(name, layout) for layout in dict.fromkeys(readers.values())}
        input_blocks[name] = {operation: blocks[layout] for operation, layout in readers.items()}
    return input_blocks


def compute_loss_divisor(plan: Plan, corpus: Corpus, first: int, end: int) -> float:
    """Return the part of training samples [first, end) in the divisor that turns a summed loss into a mean: the number
    of labels that count, or of pairs of answers, or, if labels have weights, the sum of their magnitudes."""
    if LABEL_WEIGHTS not in plan.reader_layouts or PAIRED in plan.reader_layouts:  # weights of a pair add up to 1
        return corpus.predicted("train", first, end)
    total, at_once = 0.0, plan.sizes["batch"]
    for start in range(first, end, at_once):
        samples = corpus.batch("train", start, min(start + at_once, end))
        total += float(np.abs(samples[LABEL_WEIGHTS])[samples["labels"] >= 0].sum())
    return total


def refuse_missing_labels(corpus: Corpus, first: int, end: int) -> NoReturn:
    """Raise ConfigError for a step on training samples [first, end), none of whose labels counts: it needs one."""
    where = f"training samples {first} to {end - 1}, of which the first is {corpus.describe_sample('train', first)}"
    raise ConfigError(f"train.global_batch={end - first}: {where}, have no label; nearest legal: a larger one")


PipelineOf = Callable[..., PipelineExecutor]  # `StagePasses.build_pipeline` or `StagePasses.build_lone_stage`


class StagePasses:
    """Passes of a rank over microbatches whose sequences have one length. `stage`: the plan of this
    rank's stage; `pieces`: sequences that a sample of the corpus is cut into; `batch`: sequences of a microbatch of all
    replicas."""

    def __init__(self, config: Config, plan: Plan, built_rank: Rank, corpus: Corpus):
        """Prepare the passes of a rank that was built under `plan`, the plan of one length of sequences."""
        self.config, self.plan, self.corpus = config, plan, corpus
        self.stage, self.communicator, self._weights, self.model, self.ops, _ = built_rank
        self.pieces, self.batch = config.model.length // plan.sizes["length"], plan.sizes["batch"]
        self._parts = {chunk.number: replace(self.stage, chunks=(chunk,)) for chunk in self.stage.chunks}
        self._compiled: CompiledRows = {}  # for the executors of all steps
        device = self.communicator.device
        self.total = torch.zeros((), dtype=torch.float64, device=device)  # of the losses of a step, on this rank
        self.divisor = torch.ones_like(self.total)  # of each loss before its backward pass
        self.recorder: PassRecorder | None = None

    def build_pipeline(self, forward: Forward, accumulated: Accumulated = lambda *_: None) -> PipelineExecutor:
        """Construct the executor of this stage's row of the schedule. `forward` runs a model chunk on a microbatch;
        `accumulated` is called after a backward action, with the chunk's number if it was that chunk's last, else
        None."""
        dtype = DTYPES[self.stage.precision][0]
        return PipelineExecutor(self.stage, self.communicator, dtype, forward, accumulated, self._compiled)

    def build_lone_stage(self, forward: Forward, accumulated: Accumulated = lambda *_: None) -> PipelineExecutor:
        """Construct an executor as `build_pipeline` does, of this stage without neighbours, for a rehearsal."""
        return StageAlone(self.stage, self.communicator, DTYPES[self.stage.precision][0], forward, accumulated)

    def run_chunk(self, chunk: Chunk, flow: Activations, split: str, first: int, end: int) -> Activations:
        """Run a model chunk's forward pass on the microbatch (of all replicas together) that starts at sequence `first`
        of a global batch that ends before `end`, in the data's `split`; return its output activations or loss. `flow`:
        the activations from the previous chunk."""
        if not self.is_recording:
            self.begin_chunk(chunk, split, first, end)
        inputs, residency = self.ops.position.inputs, self._weights.residency
        if residency:
            residency.begin_pass(chunk.number)
        if chunk.units:
            out = self.model.part(self.ops, inputs, flow, chunk.units)
        else:
            out = {"loss": self.model.forward(self.ops, inputs)}
        if residency:
            residency.end_forward_pass(out)
        return out

    @property
    def is_recording(self) -> bool:
        """Return True while a pass is recorded, for which its position is there, with its data."""
        return self.recorder is not None and self.recorder.is_recording

    def drop_recorder(self) -> None:
        """Drop the graphs of recorded passes, and compute all passes from now on."""
        recorder, self.recorder = self.recorder, None
        if recorder:
            recorder.drop_graphs()

    def begin_chunk(self, chunk: Chunk, split: str, first: int, end: int) -> None:
        """Load the data of a model chunk's forward pass into the present position; arguments as of `run_chunk`."""
        with self.communicator.clock.time_section("data"):
            self.ops.begin_pass(self.load_input_blocks(split, first, end, chunk))

    def load_input_blocks(self, split: str, first: int, end: int | None = None, chunk: Chunk | None = None) -> Blocks:
        """Load this rank's input blocks of the microbatch (of all replicas together) that starts at sequence `first` of
        the data's `split`. `chunk`: the model chunk whose operations read them, None for all of this stage; `end`:
        sequences from there on complete a partial batch, and are padding whose labels do not count."""

        def read_sequences(i: int, j: int) -> Mapping[str, Any]:
            """Read sequences [i, j) of the microbatch from the corpus, by data tensor; rows beyond `end` are padding,
            all -1."""
            stop = first + j if end is None else min(first + j, end)
            start = min(first + i, stop - 1)
            missing = first + j - stop if first + i < stop else j - i
            sequences = self._read_sequences(split, start, stop)
            if not missing:
                return sequences
            real_rows = {name: rows[: j - i - missing] for name, rows in sequences.items()}
            return {name: np.pad(rows, ((0, missing), (0, 0)), constant_values=-1) for name, rows in real_rows.items()}

        stage_plan = self._parts[chunk.number] if chunk else self.stage
        rows = {(i, j): read_sequences(i, j) for i, j in stretches(stage_plan, self.communicator)}
        return place(stage_plan, self.communicator, rows, self.corpus.teacher)

    def _read_sequences(self, split: str, start: int, stop: int) -> dict[str, Any]:
        """Read sequences [start, stop) from the corpus, by data tensor, with what multi-token prediction reads."""
        sequences = read_sequence_batch(self.corpus, split, start, stop, self.pieces)
        if not (depth := self.config.model.predict_ahead):
            return sequences
        return {**sequences, **read_ahead(sequences, depth, self.config.model.within_documents)}

    def count_labels_ahead(self, split: str, first: int, end: int) -> list[int]:
        """Count the labels of samples [first, end) of the data's `split` by depth of multi-token prediction."""
        counts, depths = [0] * self.config.model.predict_ahead, range(1, self.config.model.predict_ahead + 1)
        first, end = first * self.pieces, end * self.pieces
        for start in range(first, end if counts else first, self.batch):
            sequences = self._read_sequences(split, start, min(start + self.batch, end))
            counts = [n + int((sequences[label_tensor(k)] >= 0).sum()) for n, k in zip(counts, depths, strict=True)]
        return counts

    @property
    def counts_by_reading(self) -> bool:
        """Return True if counting a step's labels reads its samples, not an index of documents alone."""
        weighted = LABEL_WEIGHTS in self.plan.reader_layouts and PAIRED not in self.plan.reader_layouts
        return bool(self.config.model.predict_ahead or weighted or self.corpus.counts_by_reading)

    @torch.no_grad()
    def evaluate_microbatch(
        self, row: tuple[Action, ...], split: str, first: int, end: int, alone: bool = False
    ) -> Tensor:
        """Run the forward pass of an evaluation, a stage's `row`, on the microbatch that starts at sample `first` of
        the data's `split` and ends before `end`. Return this rank's summed loss, an fp64 scalar. `alone`: without the
        other stages, for a rehearsal."""
        total = torch.zeros((), dtype=torch.float64, device=self.communicator.device)

        def forward(chunk: Chunk, _: int, flow: Activations, deferred: Deferred | None) -> Activations:
            """Run a model chunk on the evaluation's microbatch, and add its loss to the total; return its output."""
            self.ops.position = PassPosition(training=False)  # of this pass: its documents make its masks
            out = self.run_chunk(chunk, flow, split, first, end)
            total.add_(out.get("loss", 0.0))
            return out

        (self.build_lone_stage if alone else self.build_pipeline)(forward).run_row(row)
        return total
