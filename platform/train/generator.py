"""Generator: continues the texts of a batch, on all ranks together, by tokens that are chosen alike under every plan,
and scores given texts.

`PaddedTexts` is the texts as passes read them: token ids padded to one length, and the positions at which the texts
begin. `TextBeams` is a beam search: the continuations of each text that are kept step by step, and the best in the
end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from platform.config.fields import Config
from platform.model.layers import Activations
from platform.plan import generation_passes
from platform.plan.chunks import Chunk, common_name
from platform.plan.generation_passes import HEAD, PIECE, SCORED, PassShape, generation_batch_unit, pass_row, plan_pass
from platform.plan.layout import pad_to_multiple
from platform.plan.operations.attention import KeyValueCache
from platform.plan.plan import Plan
from platform.predict.choose_schedule import build_generation_model
from platform.runtime import residual
from platform.runtime.communicator import Communicator
from platform.runtime.conversion import convert, is_absent_block
from platform.runtime.einsum import Deferred
from platform.runtime.parallel_ops import ParallelOps
from platform.runtime.pipeline import PipelineExecutor
from platform.runtime.residency import ParameterResidency, ResidentSpan
from platform.runtime.statistics import widen_dtype
from platform.train.rank_parameters import DTYPES, RankWeights
from platform.train.replies import AskedTexts, Choice, Scored, Written
from platform.train.stage_passes import place as place_inputs
from platform.train.stage_passes import stretches

ROUND = 16  # shorter texts are padded to a multiple of it, so that batches of like length share their passes


class PaddedTexts:
    """Texts padded with rows to a multiple of `unit` and with tokens to one length, on the left for texts that are
    continued (`left`), so that all go on at one index. Each text has `copies` rows next to each other. `source`: the
    tokens of an encoder's row, 0 without; `most`: limit of tokens of a text that is scored; `ranks` that share each
    text, where a pass reads a `piece` of it."""

    def __init__(
        self, texts: AskedTexts, unit: int, *, pads_left: bool, rows_per_text: int, source: int, most: int, ranks: int
    ):
        """Pad texts, given as token ids, to a batch int64 [rows, tokens] that generation passes read. `unit`: number of
        which the number of texts is made a multiple; `pads_left`: pad in front, for texts to be continued;
        `rows_per_text`: rows per text, for beams; `source`: tokens of an encoder's row, 0 without an encoder; `most`:
        limit of tokens of a text to be scored; `ranks`: number of ranks that share each text."""
        count = len(texts.ids)
        more = pad_to_multiple(count, unit) - count
        rows = [*texts.ids, *[[0]] * more]
        longest = max(map(len, rows))
        self.ranks, least = ranks, pad_to_multiple(PIECE, ranks)
        self.piece = least * max(1, ranks // (len(rows) * rows_per_text))  # of which a rank has no more than alone
        if not pads_left:  # the last token of a text is only predicted
            self.longest = max(longest, min(pad_to_multiple(longest - 1, ROUND) + 1, most))
        else:
            unit = pad_to_multiple(ROUND, ranks) if longest <= least else least
            self.longest = longest if longest == 1 else pad_to_multiple(longest, unit)
        self.texts, self.rows = count, len(rows) * rows_per_text
        ids = torch.zeros(len(rows), self.longest, dtype=torch.int64)
        for row, text in zip(ids, rows, strict=True):
            row.narrow(0, self.longest - len(text) if pads_left else 0, len(text)).copy_(torch.tensor(text))
        begins = torch.tensor([self.longest - len(text) if pads_left else 0 for text in rows])
        self.ids, self.begins = (t.repeat_interleave(rows_per_text, 0) for t in (ids, begins))
        numbers = [*(texts.numbers or range(count)), *[0] * more]
        self.numbers = torch.tensor(numbers).repeat_interleave(rows_per_text, 0)
        self.source: Tensor | None = None
        if source:  # padded with -1; a row without a text has a single 0
            source_ids = torch.full((len(rows), source), -1)
            source_ids[:, 0] = 0
            for row, text in zip(source_ids, texts.sources, strict=False):
                row[: len(text)] = torch.tensor(text)
            self.source = source_ids.repeat_interleave(rows_per_text, 0)

    def build_data(self, tokens: Tensor, offset: int) -> dict[str, Tensor]:
        """Return the data tensors, by name, of a generation pass that reads `tokens` [rows, n] from `offset` on."""
        index = torch.arange(offset, offset + tokens.shape[1])
        begins = torch.minimum(index, self.begins.unsqueeze(1))  # padding sees itself, lest it see nothing
        tensors = {"tokens": tokens, "begins": begins, "positions": (index - begins).contiguous()}
        return tensors if self.source is None else {**tensors, "source": self.source}


def find_beam_candidates(logits: Tensor, rule: Choice) -> Tensor:
    """Return the likeliest next tokens of every beam, for a beam search over generated texts: fp64 [rows, count, 2],
    log-probability and token id, from `logits` [rows, vocab]. The count is twice the number of beams, so that enough
    remain where some of these tokens end a text."""
    p = torch.log_softmax(widen_dtype(logits), -1)[:, : rule.vocab].double()
    likeliest = p.topk(min(2 * rule.beams, rule.vocab), -1)
    return torch.stack((likeliest.values, likeliest.indices.double()), -1)


class TextBeams:
    """Beams of one text: `ids` and `totals`, the continuations that are kept and their log-probabilities in nats, and
    the ones that have `ended`, as (score, ids, log-probability)."""

    def __init__(self, rule: Choice, ends: Sequence[int]):
        """Start the beam search for a text's continuation, with how.beams empty beams. `ends`: ids that end a text."""
        self._how, self._ends = rule, frozenset(ends)
        self.ids: list[list[int]] = [[] for _ in range(rule.beams)]
        self.totals = [0.0] + [-inf] * (rule.beams - 1)  # all are the same text at first
        self.ended: list[tuple[float, list[int], float]] = []
        self.done = False

    def extend_beams(self, next_tokens: Tensor) -> list[int]:
        """Extend the beams of the text by one token: keep the likeliest continuations among each beam's next tokens,
        `next_tokens` [beams, count, 2] from `find_beam_candidates`. Return, for every kept beam, the index of the beam
        that it continues."""
        count = next_tokens.shape[1]
        values = next_tokens[:, :, 0] + torch.tensor(self.totals, dtype=torch.float64).unsqueeze(-1)
        order = values.flatten().argsort(descending=True, stable=True)[: 2 * self._how.beams].tolist()
        kept_beams: list[tuple[int, list[int], float]] = []
        for rank, place in enumerate(order):
            beam, column = divmod(place, count)
            total, token = float(values[beam, column]), int(next_tokens[beam, column, 1])
            if token in self._ends:
                if rank < self._how.beams and total > -inf:
                    self._end_beam(self.ids[beam], total, 1)
            elif len(kept_beams) < self._how.beams:
                kept_beams.append((beam, [*self.ids[beam], token], total))
        while len(kept_beams) < self._how.beams:  # a vocabulary smaller than the beams
            kept_beams.append((0, [*self.ids[0], 0], -inf))
        self.ids, self.totals = [ids for _, ids, _ in kept_beams], [total for *_, total in kept_beams]
        best = self._score_beam(self.totals[0], len(self.ids[0]))
        self.done = len(self.ended) >= self._how.beams and best <= self.ended[-1][0]
        return [beam for beam, *_ in kept_beams]

    def _end_beam(self, ids: list[int], total: float, end_tokens: int) -> None:
        """Add a text to the ended beams, keep the best; `end_tokens`: 1 if an end token is not in `ids`."""
        self.ended.append((self._score_beam(total, len(ids) + end_tokens), ids, total))
        self.ended = sorted(self.ended, key=lambda beam: -beam[0])[: self._how.beams]

    def _score_beam(self, total: float, length: int) -> float:
        """Return a beam's score: its log-probability `total` / length^length_penalty, `length` in generated tokens."""
        return float(total / length**self._how.length_penalty)

    def best_continuation(self) -> Written:
        """Return the beam search's best continuation of the text: ended or, if the search was cut off, unended."""
        ended = {id(ids) for _, ids, _ in self.ended}
        if not self.done:
            for ids, total in zip(self.ids, self.totals, strict=True):
                self._end_beam(ids, total, 0)
        _, ids, total = self.ended[0]
        return Written(ids, id(ids) in ended, total)


Reading = Callable[[Tensor, slice], Tensor]  # of logits [tokens, rows of a rank, vocab], and which rows these are
_DRAW = 2.0**-32
Rows = Mapping[str, Tensor]  # data tensors of all sequences by name, int64 [batch, length]


class RankPass:
    """Passes of one `shape` on the rank of `communicator`, through the chunks of its pipeline stage; `weights`: this
    rank's, laid out as the run's `plan` says."""

    def __init__(self, plan: Plan, communicator: Communicator, weights: RankWeights, model: Any, shape: PassShape):
        """Plan generation passes of one `shape` on this rank: how `model` computes the logits of a batch of texts.
        `plan`: the training run's plan; `weights`: this rank's blocks or shards, laid out by it."""
        self._communicator, self._model, self._shape = communicator, model, shape
        self._stage = communicator.coordinates["stage"]
        self._planned = pass_plan = plan_pass(plan, model, shape, self._stage)
        self._last = plan.chunks[-1].number
        parts = pass_plan.body, pass_plan.head
        self._body, self._head = (ParallelOps(p, communicator, weights.forward_tensors, ahead=False) for p in parts)
        if weights.residency:
            residency = self._build_residency(weights, frees=plan.frees_weights)
            self._body.residency = self._head.residency = residency
        self._parts = {c.number: replace(pass_plan.body, chunks=(c,)) for c in pass_plan.body.chunks}
        self._row = pass_row(pass_plan.placement, self._stage)
        self._compiled: dict[Any, Any] = {}
        self._dtype = DTYPES[plan.precision][0]

    def _build_residency(self, weights: RankWeights, frees: bool) -> ParameterResidency:
        """Construct the Residency that gathers ZeRO shards, span of the model by span, during a generation pass.
        `frees`: True if the gathered parameters of a span are freed after it (ZeRO-3), False if they stay."""
        flats = {p.name: flat for flat in weights.buckets for p in flat.bucket.parameters}
        head = tuple(p for spans in self._planned.head.chunks[-1].spans for p in spans)
        spans = {}
        for c in self._planned.body.chunks:
            names = [*c.spans[:-1], (*c.spans[-1], *(head if c.number == self._last else ()))]
            buckets = [[*{id(flats[n]): flats[n] for n in span}.values()] for span in names]
            pairs = zip(names, buckets, strict=True)
            spans[c.number] = [ResidentSpan(common_name(span) if frees else "", flat) for span, flat in pairs]
        return ParameterResidency(
            self._communicator,
            spans,
            frees_parameters=frees,
            keeps_last_span=False,
            prefetches=True,
            as_they_are=True,
        )

    @torch.no_grad()
    def run_pass(self, rows: Rows, offset: int, cache: KeyValueCache) -> Tensor | None:
        """Run a generation pass on this rank's pipeline stage. Return the logits [tokens asked, sequences of this rank,
        vocab] that predict the tokens that come next, on the last stage; None on others. `rows`: data tensors of the
        tokens read; `offset`: number of tokens of each text that the key-value `cache` already has."""
        logits: list[Tensor] = []

        def forward(chunk: Chunk, _: int, flow: Activations, deferred: Deferred | None) -> Activations:
            """Run a model chunk on `flow` in this generation pass; the last chunk's logits are appended to `logits`."""
            return self._run_chunk(chunk, flow, rows, logits)

        self._body.begin_generation_pass(offset, cache)
        self._head.begin_generation_pass(offset + self._shape.tokens - self._shape.asked, cache)
        executor = PipelineExecutor(self._planned.body, self._communicator, self._dtype, forward, rows=self._compiled)
        executor.run_row(self._row)
        self._body.cache = self._head.cache = None  # it is the caller's alone, who may drop it
        return logits[0] if logits else None

    def _run_chunk(self, chunk: Chunk, flow: Activations, rows: Rows, logits: list[Tensor]) -> Activations:
        """Run a model chunk of a generation pass on `flow`, the activations of the chunk before, and return its own.
        The last chunk also runs the model's head and appends the logits to `logits`. `rows`: data tensors of the tokens
        read."""
        chunk_plan, communicator = self._parts[chunk.number], self._communicator
        read = {(i, j): {n: t[i:j] for n, t in rows.items()} for i, j in stretches(chunk_plan, communicator)}
        self._body.position.inputs = inputs = place_inputs(chunk_plan, communicator, read)
        if residency := self._body.residency:
            residency.begin_pass(chunk.number)
        outputs = self._model.part(self._body, inputs, {**self._planned.missing, **flow}, chunk.units)
        if chunk.number == self._last:
            stream = outputs["stream"]
            if not is_absent_block(stream):
                stream = convert(self._communicator, stream, self._planned.joins.forward).wait()
            last = {"memory": None, "stream": stream if is_absent_block(stream) else stream[-self._shape.asked :]}
            split_logits = self._model.part(self._head, {}, last, (HEAD,))["logits"]
            whole_logits = convert(self._communicator, split_logits, self._planned.gathers.forward).wait()
            logits.append(whole_logits[..., : self._planned.head.sizes["vocab"]])
        if residency:
            residency.end_pass()
        return {name: x for name, x in outputs.items() if x is not None}

    @property
    def sequence_span(self) -> slice:
        """Return the slice of the batch's texts that this rank has logits of after a generation pass."""
        plan = self._planned.head
        axes = plan.layout(self._planned.logits)["batch"]
        count = self._shape.batch // plan.mesh.count_ranks(axes)
        first = self._communicator.group_index(axes) * count
        return slice(first, first + count)

    @property
    def is_logits_rank(self) -> bool:
        """Return True if the generator reads this rank's logits: of ranks with equal ones, a single rank's are read."""
        plan, coordinates = self._planned.head, self._communicator.coordinates
        axes = plan.layout(self._planned.logits)["batch"]
        last = coordinates["stage"] == plan.chunks[-1].stage
        return last and not any(coordinates[a] for a in plan.mesh.axes if a not in (*axes, "stage"))


class TextGenerator:
    """Runs passes of generation on the rank of `communicator`, whose `weights` lie as the run's `plan` says. All ranks
    call its methods together, with equal arguments, and get equal results."""

    def __init__(self, config: Config, plan: Plan, communicator: Communicator, weights: RankWeights):
        """Prepare this rank to continue and score texts with its weights; passes are planned when first needed."""
        self._config, self._plan, self._communicator, self._weights = config, plan, communicator, weights
        self._models: dict[int, Any] = {}  # by what an encoder reads
        self._passes: dict[tuple[PassShape, int], RankPass] = {}

    def continue_texts(self, texts: AskedTexts, tokens: int, rule: Choice, ends: Sequence[int] = ()) -> list[Written]:
        """Generate a continuation of each text, up to `tokens` tokens long, all ranks together. `rule`: the rule by
        which each next token is chosen from its logits; `ends`: token ids that end a text."""
        if rule.beams > 1:
            return self._search_beams(texts, tokens, rule, ends)
        batch, cache = self._build_batch(texts, tokens)
        stops = torch.tensor(list(ends), dtype=torch.int64)
        generated = torch.full((batch.rows, tokens), -1)
        going = torch.arange(batch.rows) < batch.texts
        run, logits = self._prefill_cache(batch, cache)
        for i in range(tokens):
            choice = lambda x, mine: choose_tokens(x[-1], rule, batch.numbers[mine], i)  # noqa: B023, E731
            new = self._share_numbers(run, logits, torch.zeros_like(batch.numbers), choice)
            generated[:, i] = torch.where(going, new, -1)
            going &= ~torch.isin(new, stops)
            if i + 1 == tokens or not going.any():
                break
            run, logits = self._run_pass(batch, new.unsqueeze(1), batch.longest + i, cache)
        return [_build_continuation(row[row >= 0], stops) for row in generated[: batch.texts]]

    def _search_beams(self, texts: AskedTexts, tokens: int, rule: Choice, ends: Sequence[int]) -> list[Written]:
        """Continue each text by the best continuation that a beam search finds, with the arguments and result of
        `continue_texts`. The beams of a text are adjacent rows of the batch, on the same ranks, so that they may go on
        from each other's key-value cache."""
        batch, cache = self._build_batch(texts, tokens, rows_per_text=rule.beams)
        rows = torch.arange(batch.rows).view(-1, rule.beams)
        beams = [TextBeams(rule, ends) for _ in rows]
        run, logits = self._prefill_cache(batch, cache)
        for i in range(tokens):
            empty = torch.zeros(batch.rows, min(2 * rule.beams, rule.vocab), 2, dtype=torch.float64)
            next_tokens = self._share_numbers(run, logits, empty, lambda x, _: find_beam_candidates(x[-1], rule))
            going = [b for b in range(batch.texts) if not beams[b].done]
            for b in going:
                first = b * rule.beams
                rows[b] = first + torch.tensor(beams[b].extend_beams(next_tokens[first : first + rule.beams]))
            if i + 1 == tokens or all(b.done for b in beams[: batch.texts]):
                break
            cache.reorder_sequences(rows.flatten())
            new = torch.tensor([ids[-1] if ids else 0 for b in beams for ids in b.ids])
            run, logits = self._run_pass(batch, new.unsqueeze(1), batch.longest + i, cache)
        return [b.best_continuation() for b in beams[: batch.texts]]

    def score_texts(self, texts: AskedTexts, starts: Sequence[int]) -> list[Scored]:
        """Score texts under the model, all ranks together: return, for each, the log-probability of its tokens from
        number `starts[i]` (1 or more) to its end, in nats, and whether each of these is the likeliest at its place."""
        batch, cache = self._build_batch(texts, 0, pads_left=False)
        positions = torch.arange(1, batch.longest).expand(batch.rows, -1)
        ends = torch.tensor([len(ids) for ids in texts.ids] + [0] * (batch.rows - batch.texts))
        begins = torch.tensor([*starts, *[0] * (batch.rows - batch.texts)])
        counts = (positions >= begins.unsqueeze(1)) & (positions < ends.unsqueeze(1))
        total = torch.zeros(batch.rows, 2, dtype=torch.float64)
        for first in range(0, batch.longest - 1, SCORED):
            piece = slice(first, min(first + SCORED, batch.longest - 1))
            labels, counted = batch.ids[:, first + 1 : piece.stop + 1], counts[:, piece]
            run, logits = self._run_pass(batch, batch.ids[:, piece], first, cache, asked=piece.stop - first)

            def sum_scores(x: Tensor, own_rows: slice, labels: Tensor = labels, counted: Tensor = counted) -> Tensor:
                """Return `_score_labels` of a piece of the texts in the rows `own_rows`, fp64 [rows, 2], from logits
                `x`."""
                return _score_labels(x, labels[own_rows].t().to(x.device), counted[own_rows].t().to(x.device))

            total += self._share_numbers(run, logits, torch.zeros_like(total), sum_scores)
        return [Scored(log_probability, misses == 0) for log_probability, misses in total[: batch.texts].tolist()]

    def rank_classes(self, texts: AskedTexts, classes: int, temperature: float) -> Tensor:
        """Rank what may follow each token of texts, all ranks together: return fp64 [texts, tokens, 2 classes], the
        likeliest next tokens by logits / `temperature`, and then their log-probabilities."""
        longer = AskedTexts([[*ids, 0] for ids in texts.ids])  # of a text that is scored, the last token is not read
        batch, cache = self._build_batch(longer, 0, pads_left=False)
        ranked = torch.zeros(batch.rows, batch.longest - 1, 2 * classes, dtype=torch.float64)
        for first in range(0, batch.longest - 1, SCORED):
            piece = slice(first, min(first + SCORED, batch.longest - 1))
            run, logits = self._run_pass(batch, batch.ids[:, piece], first, cache, asked=piece.stop - first)

            def rank_next(x: Tensor, _: slice) -> Tensor:
                """Return the classes of a piece of the texts of this rank, [rows, tokens, 2 classes], from logits."""
                logs, ids = torch.log_softmax(widen_dtype(x) / temperature, -1).topk(classes, -1)
                return torch.cat((ids.double(), logs.double()), -1).transpose(0, 1)

            ranked[:, piece] = self._share_numbers(run, logits, torch.zeros_like(ranked[:, piece]), rank_next)
        return ranked[: batch.texts]

    def _build_batch(
        self, texts: AskedTexts, tokens: int, *, pads_left: bool = True, rows_per_text: int = 1
    ) -> tuple[PaddedTexts, KeyValueCache]:
        """Pad texts to a batch that generation passes of this plan can read, and return it with an empty key-value
        cache that has room for each text and `tokens` more. `pads_left`, `rows_per_text`: arguments of
        `PaddedTexts`."""
        plan = self._plan
        ranks = generation_passes.ranks_per_text(plan, len(texts.ids), max(map(len, texts.ids)))
        unit = generation_batch_unit(plan.scheme, plan.mesh, ranks > 1)
        sizes = {"source": self._encoder_length(texts), "most": self._config.model.length + 1, "ranks": ranks}
        batch = PaddedTexts(texts, unit, pads_left=pads_left, rows_per_text=rows_per_text, **sizes)
        return batch, KeyValueCache(generation_passes.pad_cache_length(plan, batch.longest + tokens, ranks > 1))

    def _encoder_length(self, texts: AskedTexts) -> int:
        """Return the tokens of the encoder's input of these texts: as configured where positions are learned, else as
        many as the longest text has, rounded up to 16; 0 without an encoder."""
        m = self._config.model
        most = (m.source_length or m.length) if m.kind == "encoder_decoder" else 0
        if m.positions == "learned" or not most:
            return most
        return min(most, pad_to_multiple(max(map(len, texts.sources)), 16))

    def _prefill_cache(self, batch: PaddedTexts, cache: KeyValueCache) -> tuple[RankPass, Tensor | None]:
        """Read a batch of texts into the key-value `cache`, pass by pass; return the last pass, with its logits."""
        *others, last = range(0, batch.longest, batch.piece)
        for first in others:
            self._run_pass(batch, batch.ids[:, first : first + batch.piece], first, cache)
        return self._run_pass(batch, batch.ids[:, last:], last, cache)

    def _run_pass(
        self, batch: PaddedTexts, tokens: Tensor, offset: int, cache: KeyValueCache, asked: int = 1
    ) -> tuple[RankPass, Tensor | None]:
        """Run the generation pass in which the model reads `tokens` [rows, n], behind the `offset` tokens per text that
        are in `cache`. Return the pass, and the logits [asked, rows of this rank, vocab] after the last `asked` of
        these tokens, None on ranks of other pipeline stages."""
        source = 0 if batch.source is None else batch.source.shape[1]
        reads, shared = source > 0 and offset == 0, batch.ranks > 1
        shape = PassShape(tokens.shape[1], batch.rows, cache.capacity, asked, reads, shared)
        if any((s.batch, s.capacity) != (shape.batch, shape.capacity) or n != source for s, n in self._passes):
            self._passes.clear()
        if (run := self._passes.get((shape, source))) is None:
            model = self._models.setdefault(source, build_generation_model(self._config, source))
            run = RankPass(self._plan, self._communicator, self._weights, model, shape)
            self._passes[shape, source] = run
        with self._communicator.clock.time_section("forward"):
            return run, run.run_pass(batch.build_data(tokens, offset), offset, cache)

    def _share_numbers(self, run: RankPass, logits: Tensor | None, out: Tensor, numbers: Reading) -> Tensor:
        """Compute numbers of each text from its logits, on a rank that has these, and return them on all ranks: `out`
        [rows, ...], filled. `numbers`: function of a rank's logits and the slice of its rows; `run`: the generation
        pass that gave `logits`, None on ranks of other pipeline stages."""
        communicator = self._communicator
        if logits is not None and run.is_logits_rank:
            own_rows = run.sequence_span
            own_numbers = numbers(logits, own_rows)
            with communicator.clock.mark_waiting_for_device():
                out[own_rows] = own_numbers.to(out)
        if world := self._plan.mesh.order_axes(self._plan.mesh.axes):
            summed = communicator.launch("all_reduce", out.to(communicator.device), world).wait()
            with communicator.clock.mark_waiting_for_device():
                out = summed.cpu()
        return out


def _build_continuation(ids: Tensor, stops: Tensor) -> Written:
    """Return a text's generated token ids as its continuation, without a last one in `stops`, ids that end a text."""
    ended = bool(torch.isin(ids[-1:], stops).any())
    return Written(ids[: len(ids) - ended].tolist(), ended)


def _score_labels(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """Score labels, the tokens that texts really have next, by a model's logits [length, rows, vocab]: return fp64
    [rows, 2], each row's summed log-probability and its number of labels that are not the likeliest token. `labels`,
    `counted` [length, rows]: token ids, and True where they are scored."""
    p = torch.log_softmax(widen_dtype(logits), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).double()
    missed = logits.argmax(-1) != labels
    return torch.stack([(p * counted).sum(0), (missed & counted).double().sum(0)], -1)


def choose_tokens(logits: Tensor, rule: Choice, sequences: Tensor, position: int) -> Tensor:
    """Choose the next token of each text from `logits` [batch, vocab], by the rule `rule`: the likeliest, or one drawn
    at random; return token ids, int64 [batch]. `position`: index of the token in the continuation. A draw depends on
    the seed, the position and the text's number in `sequences`, int64 [batch], alone, so that it is the same under
    every plan."""
    logits = logits[:, : rule.vocab].double()
    if not rule.temperature:
        return logits.argmax(-1)
    p = torch.softmax(restrict_logits(logits / rule.temperature, rule), -1)
    key = residual.derive_key(rule.seed, "answer", position)
    drawn = residual.random_bits(key, sequences.to(p.device)) & 0xFFFFFFFF
    total = p.cumsum(-1)
    tokens = torch.searchsorted(total, (drawn.double() * _DRAW * total[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    tokens = tokens.clamp_max(p.shape[-1] - 1)
    impossible = p.gather(1, tokens.unsqueeze(-1)).squeeze(-1) == 0  # by rounding alone
    return torch.where(impossible, p.argmax(-1), tokens)


def restrict_logits(logits: Tensor, rule: Choice) -> Tensor:
    """Restrict sampling of a next token by top_k and top_p: return `logits` [batch, vocab], -inf for tokens that these
    leave out."""
    if 0 < rule.top_k < logits.shape[-1]:
        least = logits.topk(rule.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if rule.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True, stable=True)
        p = torch.softmax(ordered, -1)
        beyond = p.cumsum(-1) - p >= rule.top_p  # what the likelier ones have together is enough
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, places, beyond), -torch.inf)
    return logits
