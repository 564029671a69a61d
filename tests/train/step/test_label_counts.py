"""The labels of a step, by which its loss is divided, are counted by all ranks, a share each, so that none reads all
samples. What goes wrong in one rank's share is that rank's error, at the step's turn, and no other's."""

from __future__ import annotations

from math import isclose, isnan
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import PREFERENCE, Config
from platform.config.ramps import step_sample_range
from platform.data.objectives import Causal
from platform.data.special_tokens import SpecialIds
from platform.data.streams import DocumentStream
from platform.plan.model_types import label_tensor
from platform.predict.make_plan import make_plan
from platform.train.stage_passes import compute_loss_divisor
from platform.train.trainer import Trainer
from tests.harness.oracle import Tokens, configure, trainer_of
from tests.harness.threads import run_threads

AHEAD = {"predict_ahead": 2, "within_documents": True}
CASES: dict[str, dict[str, Any]] = {
    "by depth": {**AHEAD, "data": 2, "global_batch": 6},
    "a batch that replicas do not divide": {"kind": "encoder", "data": 3, "global_batch": 7},
    "more ranks than samples": {"kind": "encoder", "data": 2, "tensor": "1d", "axes": {"t": 2}, "global_batch": 3},
    "stages": {**AHEAD, "pipeline": "1f1b", "stages": 2, "global_batch": 8, "microbatch": 2},
    "pairs of answers": {"objective": PREFERENCE, "data": 2, "global_batch": 6},
}


class Counted(Tokens):
    """Tokens of the oracle that note which samples are looked at."""

    def __init__(self, c: Config):
        super().__init__(c)
        self.seen: set[int] = set()

    def batch(self, split, start, end):
        self.seen |= set(range(start, end))
        return super().batch(split, start, end)


def configured(case: str) -> Config:
    options = {"precision": "fp64", "layers": 1, **CASES[case]}
    objective = options.pop("objective", None)
    c = configure(**options)
    c.data.objective = objective or c.data.objective
    c.train.steps = 4
    return c


def count(case: str) -> list[tuple[list[float], list[float], set[int]]]:
    """What each rank counts of step 2, what all its samples have, and which of them it looks at."""
    c = configured(case)
    plan = make_plan(c)

    def work(communicator):
        trainer = trainer_of(c, plan, communicator, Counted(c))
        trainer.corpus.seen.clear()
        counts, seen = trainer._count_labels(2), set(trainer.corpus.seen)
        first, end = step_sample_range(c.train, 2)
        rows = trainer.passes._read_sequences("train", first, end)
        whole = [compute_loss_divisor(plan, Tokens(c), first, end)]
        return counts, [*whole, *((rows[label_tensor(k + 1)] >= 0).sum() for k in range(c.model.predict_ahead))], seen

    return run_threads(plan.mesh, work)


@pytest.mark.parametrize("case", CASES)
def test_ranks_count_all_labels_together_each_a_share(case):
    c = configured(case)
    world, (first, end) = make_plan(c).mesh.world_size, step_sample_range(c.train, 2)
    ranks = count(case)
    assert [counts for counts, *_ in ranks] == [whole for _, whole, _ in ranks]
    shares = [seen for *_, seen in ranks]
    assert sorted(i for seen in shares for i in seen) == list(range(first, end)), "each sample by one rank"
    assert max(map(len, shares)) <= -(-(end - first) // world)


@pytest.mark.parametrize("wrong", ["each counts all", "each its own"])
def test_negative_control(wrong, monkeypatch):
    summed = Trainer._sum_shares

    def count_all(self, count, first, end, *how):
        return count(first, end)

    def count_own(self, count, first, end, *how):
        numbers: list[float] = []
        summed(self, lambda i, j: numbers.extend(count(i, j)) or numbers, first, end, *how)
        return numbers

    monkeypatch.setattr(Trainer, "_sum_shares", count_all if wrong == "each counts all" else count_own)
    with pytest.raises(AssertionError):
        test_ranks_count_all_labels_together_each_a_share("by depth")


def test_few_labels_are_looked_up_by_each_rank_without_a_message(monkeypatch):
    """Of plain tokens, and within documents that an index knows; very many are counted in shares there too."""
    c = configured("more ranks than samples")
    plan = make_plan(c)

    def work(communicator):
        trainer, sums = trainer_of(c, plan, communicator), []
        whole, summed = trainer._count_labels(2), communicator.sum_numbers
        communicator.sum_numbers = lambda numbers: sums.append(numbers) or summed(numbers)
        trainer.corpus.counts_by_reading = False
        assert trainer._count_labels(2) == whole
        return len(sums)

    assert run_threads(plan.mesh, work) == [0] * plan.mesh.world_size
    monkeypatch.setattr("platform.train.trainer.LOOKED_UP", 2 * c.model.length)
    assert run_threads(plan.mesh, work) == [1] * plan.mesh.world_size


def test_an_unreadable_share_is_an_error_of_its_rank_alone():
    """It is told at the step's turn; the others, whose collectives wait for that rank, do not stop for its reason."""
    c = configured("by depth")
    plan = make_plan(c)
    begin, _ = step_sample_range(c.train, 2)

    def work(communicator):
        trainer, errors = trainer_of(c, plan, communicator), []
        count = trainer.corpus.predicted

        def broken(split: str, start: int, end: int) -> int:
            if start == begin:  # rank 0's share
                raise OSError("no such sample")
            return count(split, start, end)

        trainer.corpus.predicted = broken
        assert not trainer.step(1).skipped
        try:
            counts = trainer._count_labels(2)
        except OSError as error:
            return str(error)
        return "NaN" if isnan(counts[0]) else errors

    assert run_threads(plan.mesh, work) == ["no such sample", "NaN"]


def test_a_step_without_any_label_is_refused_on_all_ranks_one_share_without_is_not():
    c = configured("by depth")
    plan = make_plan(c)
    first, _ = step_sample_range(c.train, 2)

    def work(communicator):
        trainer = trainer_of(c, plan, communicator)
        trainer.corpus.describe_sample = lambda split, number: f"sample {number}"
        whole = trainer.corpus.predicted
        trainer.corpus.predicted = lambda split, i, j: whole(split, i, j) * (i != first)
        [some, *_] = trainer._count_labels(2)
        trainer.corpus.predicted = lambda *_: 0
        with pytest.raises(ConfigError, match="have no label; nearest legal: a larger one"):
            trainer._count_labels(3)
        return some

    assert len(set(run_threads(plan.mesh, work))) == 1


def test_sums_are_alike_on_all_ranks_in_every_bit():
    """Sums of weights, that a resumed run takes again."""
    numbers = np.random.default_rng(0).random(4)
    c = configured("more ranks than samples")
    sums = run_threads(make_plan(c).mesh, lambda one: one.sum_numbers([numbers[one.rank]]))
    assert len({x.hex() for [x] in sums}) == 1 and isclose(sums[0][0], numbers.sum(), rel_tol=1e-15)


class NeverRead:
    """Token ids of which some, at most, may be read."""

    def __init__(self, length: int):
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index):
        self.reads += len(index)
        return np.ones(len(index), np.int64)


@pytest.mark.parametrize("learned", [False, True], ids=["all tokens", "some tokens"])
def test_documents_are_counted_from_their_index(learned):
    """4 million labels within documents, of which only first tokens are read: in milliseconds, not by reading all."""
    rng, length, rows = np.random.default_rng(1), 8192, 512
    tokens = NeverRead(20_000_000)
    starts = np.unique(np.append(0, rng.integers(0, len(tokens), 40_000)))
    mask = rng.random(len(tokens)) < 0.4 if learned else None
    stream, index = DocumentStream(tokens, starts, mask), np.sort(rng.permutation(len(tokens) // length - 1)[:rows])
    begun = perf_counter()
    total = Causal(length, within=True).predicted(stream, index)
    assert perf_counter() - begun < 0.5, "0.001 s; much more where it is read"
    assert 0 < total < rows * length and tokens.reads <= len(starts)
    assert not Causal(length, within=True).counts_by_reading(stream)
    assert Causal(length, SpecialIds((1, 2)), within=True).counts_by_reading(tokens), "by the ids alone"
