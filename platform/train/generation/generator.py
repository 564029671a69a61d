"""Generator: continues the texts of a batch, on all ranks together, by tokens that are chosen alike under every plan,
and scores given texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

import torch
from torch import Tensor

from platform.config.fields import Config
from platform.model.layers import Activations
from platform.parallel.communicator.base import Communicator
from platform.parallel.kernels import random
from platform.parallel.kernels.einsum import Deferred
from platform.parallel.kernels.statistics import widened
from platform.parallel.parallel_ops import ParallelOps
from platform.parallel.pipeline import PipelineExecutor
from platform.parallel.sharding.convert import absent, convert
from platform.parallel.sharding.residency import Residency, ResidentSpan
from platform.plan.communication.rule import Conversion, relayout_steps
from platform.plan.core.buckets import common_name
from platform.plan.core.chunks import Chunk
from platform.plan.core.passes import (
    HEAD,
    ROOM,
    SCORED,
    PassShape,
    memory_unit,
    pass_row,
    plan_pass,
    rows_at_once,
    sharing,
)
from platform.plan.core.plan import Plan
from platform.plan.language.layout import Layout, padded
from platform.plan.operations.attention.cached import KeyValueCache
from platform.planning.answering import answering_model
from platform.train.generation.batch import Batch
from platform.train.generation.beams import Beams, candidates
from platform.train.protocol.asked import AskedTexts, Choice, Scored, Written
from platform.train.step.inputs import place, stretches
from platform.train.step.rank_parameters import DTYPES, Weights

Reading = Callable[[Tensor, slice], Tensor]  # of logits [tokens, rows of a rank, vocab], and which rows these are
_DRAW = 2.0**-32
Rows = Mapping[str, Tensor]  # data tensors of all sequences by name, int64 [batch, length]


class RankPass:
    """Passes of one `shape` on the rank of `communicator`, through the chunks of its pipeline stage; `weights`: this
    rank's, laid out as the run's `plan` says."""

    def __init__(self, plan: Plan, communicator: Communicator, weights: Weights, model: Any, shape: PassShape):
        """Plan generation passes of one `shape` on this rank: how `model` computes the logits of a batch of texts.
        `plan`: the training run's plan; `weights`: this rank's blocks or shards, laid out by it."""
        self._communicator, self._model, self._shape = communicator, model, shape
        self._stage = communicator.coordinates["stage"]
        self._planned = found = plan_pass(plan, model, shape, self._stage)
        self._last = plan.chunks[-1].number
        passes = (ParallelOps(p, communicator, weights.read, ahead=False) for p in (found.body, found.head))
        self._body, self._head = passes
        if plan.sharded:
            residency = self._residency(weights, frees=plan.zero == 3)
            self._body.residency = self._head.residency = residency
        self._parts = {c.number: replace(found.body, chunks=(c,)) for c in found.body.chunks}
        self._row = pass_row(found.placement, self._stage)
        self._compiled: dict[Any, Any] = {}
        self._dtype = DTYPES[plan.precision][0]

    def _residency(self, weights: Weights, frees: bool) -> Residency:
        """Construct the Residency that gathers ZeRO shards, span of the model by span, during a generation pass.
        `frees`: True if the gathered parameters of a span are freed after it (ZeRO-3), False if they stay."""
        flats = {p.name: flat for flat in weights.buckets for p in flat.bucket.parameters}
        head = tuple(p for spans in self._planned.head.chunks[-1].spans for p in spans)
        spans = {}
        for c in self._planned.body.chunks:
            names = [*c.spans[:-1], (*c.spans[-1], *(head if c.number == self._last else ()))]
            buckets = [list({id(flats[n]): flats[n] for n in some}.values()) for some in names]
            pairs = zip(names, buckets, strict=True)
            spans[c.number] = [ResidentSpan(common_name(some) if frees else "", found) for some, found in pairs]
        return Residency(self._communicator, spans, frees=frees, turns=False, ahead=True)

    @torch.no_grad()
    def run(self, rows: Rows, offset: int, cache: KeyValueCache) -> Tensor | None:
        """Run a generation pass on this rank's pipeline stage. Return the logits [tokens asked, sequences of this rank,
        vocab] that predict the tokens that come next, on the last stage; None on others. `rows`: data tensors of the
        tokens read; `offset`: number of tokens of each text that the key-value `cache` already has."""
        found: list[Tensor] = []

        def forward(chunk: Chunk, _: int, flow: Activations, deferred: Deferred | None) -> Activations:
            """Run a model chunk on `flow` in this generation pass; the last chunk's logits are appended to `found`."""
            return self._run(chunk, flow, rows, found)

        self._body.read_on(offset, cache)
        self._head.read_on(offset + self._shape.tokens - self._shape.asked, cache)
        executor = PipelineExecutor(self._planned.body, self._communicator, self._dtype, forward, rows=self._compiled)
        executor.run(self._row)
        self._body.cache = self._head.cache = None  # it is the caller's alone, who may drop it
        return found[0] if found else None

    def _run(self, chunk: Chunk, flow: Activations, rows: Rows, found: list[Tensor]) -> Activations:
        """Run a model chunk of a generation pass on `flow`, the activations of the chunk before, and return its own.
        The last chunk also runs the model's head and appends the logits to `found`. `rows`: data tensors of the tokens
        read."""
        part, here = self._parts[chunk.number], self._communicator
        read = {(i, j): {n: t[i:j] for n, t in rows.items()} for i, j in stretches(part, here)}
        inputs = place(part, here, read)
        residency = self._body.residency
        if residency:
            residency.begin(chunk.number)
        out = self._model.part(self._body, inputs, {**self._planned.missing, **flow}, chunk.units)
        if chunk.number == self._last:
            stream = out["stream"]
            if not absent(stream):
                stream = convert(self._communicator, stream, self._planned.joins.forward).wait()
            last = {"memory": None, "stream": stream if absent(stream) else stream[-self._shape.asked :]}
            found.append(self._rows_of(self._model.part(self._head, {}, last, (HEAD,))["logits"]))
        if residency:
            residency.end()
        return {name: x for name, x in out.items() if x is not None}

    def _rows_of(self, logits: Tensor) -> Tensor:
        """Gather the logits' vocabulary, split over ranks: return [tokens, this rank's sequences, vocab]."""
        planner, spec = self._planned.head.planner, self._planned.logits
        source = planner.layout(spec)
        target = Layout.of({"batch": source["batch"]})
        steps = Conversion(relayout_steps(spec.dims, source, target), ())
        whole = convert(self._communicator, logits, planner.shaped(steps, spec, source, target).forward).wait()
        return whole[..., : self._planned.head.sizes["vocab"]]

    @property
    def sequences(self) -> tuple[int, int]:
        """Return which of the batch's texts this rank has logits of after a generation pass: (first, count)."""
        plan = self._planned.head
        axes = plan.layout(self._planned.logits)["batch"]
        count = self._shape.batch // plan.mesh.extent(axes)
        return self._communicator.index(axes) * count, count

    @property
    def speaks(self) -> bool:
        """Return True if the generator reads this rank's logits: of ranks with equal ones, a single rank's are read."""
        plan, here = self._planned.head, self._communicator.coordinates
        axes = plan.layout(self._planned.logits)["batch"]
        last = here["stage"] == plan.chunks[-1].stage
        return last and not any(here[a] for a in plan.mesh.axes if a not in (*axes, "stage"))


class Generator:
    """Runs passes of generation on the rank of `communicator`, whose `weights` lie as the run's `plan` says. All ranks
    call its methods together, with equal arguments, and get equal results."""

    def __init__(self, config: Config, plan: Plan, communicator: Communicator, weights: Weights):
        """Prepare this rank to continue and score texts with its weights; passes are planned when first needed."""
        self._config, self._plan, self._communicator, self._weights = config, plan, communicator, weights
        self._models: dict[int, Any] = {}  # by what an encoder reads
        self._passes: dict[tuple[PassShape, int], RankPass] = {}

    def write(self, texts: AskedTexts, tokens: int, how: Choice, ends: Sequence[int] = ()) -> list[Written]:
        """Generate a continuation of each text, up to `tokens` tokens long, all ranks together. `how`: the rule by
        which each next token is chosen from its logits; `ends`: token ids that end a text."""
        if how.beams > 1:
            return self._search(texts, tokens, how, ends)
        batch = self._batch(texts)
        cache, stops = self._cache(batch, tokens), torch.tensor(list(ends), dtype=torch.int64)
        out = torch.full((batch.rows, tokens), -1)
        going = torch.arange(batch.rows) < batch.texts
        run, logits = self._read(batch, cache)
        for i in range(tokens):
            choice = lambda x, mine: choose(x[-1], how, batch.numbers[mine], i)  # noqa: B023, E731
            new = self._to_all_ranks(run, logits, torch.zeros_like(batch.numbers), choice)
            out[:, i] = torch.where(going, new, -1)
            going &= ~torch.isin(new, stops)
            if i + 1 == tokens or not going.any():
                break
            run, logits = self._pass(batch, new.unsqueeze(1), batch.longest + i, cache)
        return [_written(row[row >= 0], stops) for row in out[: batch.texts]]

    def _search(self, texts: AskedTexts, tokens: int, how: Choice, ends: Sequence[int]) -> list[Written]:
        """Continue each text by the best continuation that a beam search finds, with the arguments and result of
        `write`. The beams of a text are adjacent rows of the batch, on the same ranks, so that they may go on from each
        other's key-value cache."""
        batch = self._batch(texts, copies=how.beams)
        cache, rows = self._cache(batch, tokens), torch.arange(batch.rows).view(-1, how.beams)
        beams = [Beams(how, ends) for _ in rows]
        run, logits = self._read(batch, cache)
        for i in range(tokens):
            empty = torch.zeros(batch.rows, min(2 * how.beams, how.vocab), 2, dtype=torch.float64)
            found = self._to_all_ranks(run, logits, empty, lambda x, _: candidates(x[-1], how))
            going = [b for b in range(batch.texts) if not beams[b].done]
            for b in going:
                rows[b] = b * how.beams + torch.tensor(beams[b].step(found[b * how.beams : (b + 1) * how.beams]))
            if i + 1 == tokens or all(b.done for b in beams[: batch.texts]):
                break
            cache.reorder(rows.flatten())
            new = torch.tensor([ids[-1] if ids else 0 for b in beams for ids in b.ids])
            run, logits = self._pass(batch, new.unsqueeze(1), batch.longest + i, cache)
        return [b.best() for b in beams[: batch.texts]]

    def score(self, texts: AskedTexts, starts: Sequence[int]) -> list[Scored]:
        """Score texts under the model, all ranks together: return, for each, the log-probability of its tokens from
        number `starts[i]` (1 or more) to its end, in nats, and whether each of these is the likeliest at its place."""
        batch = self._batch(texts, left=False)
        cache = self._cache(batch, 0)
        place = torch.arange(1, batch.longest).expand(batch.rows, -1)
        ends = torch.tensor([len(ids) for ids in texts.ids] + [0] * (batch.rows - batch.texts))
        begins = torch.tensor([*starts, *[0] * (batch.rows - batch.texts)])
        counts = (place >= begins.unsqueeze(1)) & (place < ends.unsqueeze(1))
        total = torch.zeros(batch.rows, 2, dtype=torch.float64)
        for first in range(0, batch.longest - 1, SCORED):
            at = slice(first, min(first + SCORED, batch.longest - 1))
            tokens, labels, counted = batch.ids[:, at], batch.ids[:, at.start + 1 : at.stop + 1], counts[:, at]
            run, logits = self._pass(batch, tokens, first, cache, asked=at.stop - first)

            def sums(x: Tensor, mine: slice, labels: Tensor = labels, counted: Tensor = counted) -> Tensor:
                """Return `_scores` of a piece of the texts in the rows `mine`, fp64 [rows, 2], from logits `x`."""
                return _scores(x, labels[mine].t().to(x.device), counted[mine].t().to(x.device))

            total += self._to_all_ranks(run, logits, torch.zeros_like(total), sums)
        return [Scored(found, misses == 0) for found, misses in total[: batch.texts].tolist()]

    def _batch(self, texts: AskedTexts, *, left: bool = True, copies: int = 1) -> Batch:
        """Pad texts to a batch that generation passes of this plan can read. `left`, `copies`: arguments of `Batch`."""
        plan = self._plan
        ranks = sharing(plan, len(texts.ids), max(map(len, texts.ids)))
        unit = rows_at_once(plan.scheme, plan.mesh, ranks > 1)
        more = {"source": self._source(texts), "most": self._config.model.length + 1, "ranks": ranks}
        return Batch(texts, unit, left=left, copies=copies, **more)

    def _source(self, texts: AskedTexts) -> int:
        """Return the tokens of the encoder's input of these texts: as configured where positions are learned, else as
        many as the longest text has, rounded up to 16; 0 without an encoder."""
        m = self._config.model
        most = (m.source_length or m.length) if m.kind == "encoder_decoder" else 0
        return most if m.positions == "learned" or not most else min(most, padded(max(map(len, texts.sources)), 16))

    def _cache(self, batch: Batch, tokens: int) -> KeyValueCache:
        """Return an empty key-value cache with room for each text of a batch and `tokens` more, rounded up."""
        room = lcm(ROOM, memory_unit(self._plan.scheme, self._plan.mesh, batch.ranks > 1))
        return KeyValueCache(padded(batch.longest + tokens, room))

    def _read(self, batch: Batch, cache: KeyValueCache) -> tuple[RankPass, Tensor | None]:
        """Read a batch of texts into the key-value `cache`, pass by pass; return the last pass, with its logits."""
        *others, last = range(0, batch.longest, batch.piece)
        for first in others:
            self._pass(batch, batch.ids[:, first : first + batch.piece], first, cache)
        return self._pass(batch, batch.ids[:, last:], last, cache)

    def _pass(
        self, batch: Batch, tokens: Tensor, offset: int, cache: KeyValueCache, asked: int = 1
    ) -> tuple[RankPass, Tensor | None]:
        """Run the generation pass in which the model reads `tokens` [rows, n], behind the `offset` tokens per text that
        are in `cache`. Return the pass, and the logits [asked, rows of this rank, vocab] after the last `asked` of
        these tokens, None on ranks of other pipeline stages."""
        source = 0 if batch.source is None else batch.source.shape[1]
        reads, shared = source > 0 and offset == 0, batch.ranks > 1
        shape = PassShape(tokens.shape[1], batch.rows, cache.capacity, asked, reads, shared)
        if any((s.batch, s.capacity) != (shape.batch, shape.capacity) or n != source for s, n in self._passes):
            self._passes.clear()
        if (shape, source) not in self._passes:
            model = self._models.setdefault(source, answering_model(self._config, source))
            made = RankPass(self._plan, self._communicator, self._weights, model, shape)
            self._passes[shape, source] = made
        run = self._passes[shape, source]
        with self._communicator.clock.section("forward"):
            return run, run.run(batch.data(tokens, offset), offset, cache)

    def _to_all_ranks(self, run: RankPass, logits: Tensor | None, out: Tensor, numbers: Reading) -> Tensor:
        """Compute numbers of each text from its logits, on a rank that has these, and return them on all ranks: `out`
        [rows, ...], filled. `numbers`: function of a rank's logits and the slice of its rows; `run`: the generation
        pass that gave `logits`, None on ranks of other pipeline stages."""
        communicator = self._communicator
        if logits is not None and run.speaks:
            first, count = run.sequences
            mine = slice(first, first + count)
            found = numbers(logits, mine)
            with communicator.clock.waiting_for_device():
                out[mine] = found.to(out)
        if world := self._plan.mesh.ordered(self._plan.mesh.axes):
            summed = communicator.launch("all_reduce", out.to(communicator.device), world).wait()
            with communicator.clock.waiting_for_device():
                out = summed.cpu()
        return out


def _written(ids: Tensor, stops: Tensor) -> Written:
    """Return a text's generated token ids as its continuation, without a last one in `stops`, ids that end a text."""
    ended = bool(torch.isin(ids[-1:], stops).any())
    return Written(ids[: len(ids) - ended].tolist(), ended)


def _scores(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """Score labels, the tokens that texts really have next, by a model's logits [length, rows, vocab]: return fp64
    [rows, 2], each row's summed log-probability and its number of labels that are not the likeliest token. `labels`,
    `counted` [length, rows]: token ids, and True where they are scored."""
    p = torch.log_softmax(widened(logits), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).double()
    missed = logits.argmax(-1) != labels
    return torch.stack([(p * counted).sum(0), (missed & counted).double().sum(0)], -1)


def choose(logits: Tensor, how: Choice, sequences: Tensor, position: int) -> Tensor:
    """Choose the next token of each text from `logits` [batch, vocab], by the rule `how`: the likeliest, or one drawn
    at random; return token ids, int64 [batch]. `position`: index of the token in the continuation. A draw depends on
    the seed, the position and the text's number in `sequences`, int64 [batch], alone, so that it is the same under
    every plan."""
    logits = logits[:, : how.vocab].double()
    if not how.temperature:
        return logits.argmax(-1)
    p = torch.softmax(restricted(logits / how.temperature, how), -1)
    drawn = random.bits(random.key(how.seed, "answer", position), sequences.to(p.device)) & 0xFFFFFFFF
    total = p.cumsum(-1)
    found = torch.searchsorted(total, (drawn.double() * _DRAW * total[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    found = found.clamp_max(p.shape[-1] - 1)
    impossible = p.gather(1, found.unsqueeze(-1)).squeeze(-1) == 0  # by rounding alone
    return torch.where(impossible, p.argmax(-1), found)


def restricted(logits: Tensor, how: Choice) -> Tensor:
    """Restrict sampling of a next token by top_k and top_p: return `logits` [batch, vocab], -inf for tokens that these
    leave out."""
    if 0 < how.top_k < logits.shape[-1]:
        least = logits.topk(how.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if how.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True, stable=True)
        p = torch.softmax(ordered, -1)
        beyond = p.cumsum(-1) - p >= how.top_p  # what the likelier ones have together is enough
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, places, beyond), -torch.inf)
    return logits
