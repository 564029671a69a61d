"""Texts written and scored by the ranks of a plan as threads, and by uncached forward passes of plain functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from platform.config.fields import Config
from platform.plan.plan import Plan
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator, SingleRank
from platform.train.generator import TextGenerator
from platform.train.replies import AskedTexts, Choice, Scored, Written
from platform.train.trainer import Trainer
from tests.harness import reference_transformer
from tests.harness.oracle import configure, trainer_of
from tests.harness.threads import run_threads

LOUD = 4.0  # weights are so much larger than initial ones, so that the likeliest token changes from place to place


class Watched(TextGenerator):
    """Keeps the logits of every pass, [rows, vocab] of the last token, from the ranks that speak for rows."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.seen: list[tuple[int, Tensor]] = []

    def _share_numbers(self, run, logits, out, numbers):
        if logits is not None and run.is_logits_rank:
            self.seen.append((run.sequence_span.start, logits[-1].double().clone()))
        return super()._share_numbers(run, logits, out, numbers)


@dataclass
class Said:
    """What a rank wrote and scored, with the logits that it saw: (first row, [rows, vocab]) per pass."""

    written: list[Written]
    scored: list[Scored]
    seen: list[tuple[int, Tensor]]


def louder(trainer: Trainer) -> None:
    """Makes the weights of a rank larger, alike under every plan."""
    with torch.no_grad():
        for name, w in trainer.weights.master.items():
            w.mul_(1.0 if "norm" in name else LOUD)
        for state in trainer.weights.states.values():
            state.copy_(torch.linspace(-0.5, 0.5, len(state)))
    trainer.weights.refresh_copies()


def say(c: Config, texts: AskedTexts, tokens: int, how: Choice, plan: Plan | None = None, ends=()) -> list[Said]:
    """All ranks of a plan, as threads: what each has written of the texts, and how it scored them from token 1."""
    plan = plan or make_plan(c)

    def one(communicator: Communicator) -> Said:
        torch.set_num_threads(1)
        trainer = trainer_of(c, plan, communicator)
        louder(trainer)
        generator = Watched(c, plan, communicator, trainer.weights)
        written = generator.continue_texts(texts, tokens, how, ends)
        seen = list(generator.seen)
        longer = replace(texts, ids=[[*ids, *w.ids] for ids, w in zip(texts.ids, written, strict=True)])
        return Said(written, generator.score_texts(longer, [len(ids) for ids in texts.ids]), seen)

    return [one(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, one)


def logits_seen(said: Sequence[Said], texts: int) -> list[Tensor]:
    """[texts, vocab] per pass, put together from all ranks."""
    passes = max(len(s.seen) for s in said)
    logits = []
    for i in range(passes):
        parts = dict(s.seen[i] for s in said if len(s.seen) > i)
        logits.append(torch.cat([parts[first] for first in sorted(parts)])[:texts])
    return logits


def whole_weights(c: Config) -> dict[str, Tensor]:
    """The weights of one process."""
    one = configure()
    one.model, one.seed, one.precision = c.model, c.seed, c.precision
    plan = make_plan(one)
    trainer = trainer_of(one, plan, SingleRank(plan.mesh))
    louder(trainer)
    return {
        n: w.detach()[tuple(map(slice, plan.global_shape(p)))]
        for p in (*plan.parameters, *plan.states)
        for n, w in [(p.name, trainer.weights.forward_tensors[p.name])]
    }


def uncached(c: Config, w: dict[str, Tensor], ids: Sequence[int], source: Sequence[int]) -> Tensor:
    """The logits [length, vocab] of one text by one forward pass of the whole, in plain functions."""
    tables = {n: t[: len(ids)] if n in ("position", "decoder.position") else t for n, t in w.items()}
    data = {"tokens": torch.tensor([list(ids)])}
    if c.model.kind == "encoder_decoder":
        row = torch.full((1, c.model.source_length or c.model.length), -1)
        row[0, : len(source)] = torch.tensor(list(source))
        data["source"] = row
    model = replace(c.model, within_documents=False)
    return reference_transformer.logits(model, tables, data)[0]


def some_texts(c: Config, count: int = 3) -> AskedTexts:
    """Texts of different lengths; a decoder with an encoder has read one token."""
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, c.model.vocab, (n,), generator=draw).tolist() for n in (5, 1, 8, 3)[:count]]
    if c.model.kind == "encoder_decoder":
        return AskedTexts([[2]] * count, rows, list(range(count)))
    return AskedTexts(rows, numbers=list(range(count)))
