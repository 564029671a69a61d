"""Objectives of the user's own: made, and every sample of theirs checked."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from platform.boundary.own_code import OwnCodeError, own_code
from platform.boundary.refusals import ConfigError
from platform.config.extending.own_settings import with_settings
from platform.data.objectives import (
    GIVEN,
    OBJECTIVES,
    Causal,
    Keys,
    Masked,
    Objective,
    Pairs,
    SampleShape,
    SpanDenoising,
)
from platform.data.tokens.streams import PADDING, Ints
from platform.plan.language.numbers import count_of

# Words in the keys of cache entries: another name of a class changes none.
_WORDS: dict[type, str] = {Causal: "Causal", Masked: "Masked", SpanDenoising: "SpanDenoising", Pairs: "Pairs"}


def make_objective(name: str, shape: SampleShape, settings: Mapping[str, Any]) -> Objective:
    """Construct the training objective that `data.objective` names, for samples of `shape`. A user's own gets
    `settings`, the data.objective_settings, and its samples are checked; ConfigError names any error in it."""
    if name in GIVEN:
        return OBJECTIVES[name](shape)
    with of_objective(name):
        make = with_settings(OBJECTIVES[name], "data.objective", name, settings)
        return OwnObjective(name, make(shape), shape)


@dataclass(frozen=True)
class OwnObjective:
    """Objective of a user's own, `made` for samples of a shape. Raises ConfigError, naming it and the sample, for any
    error of it, for a sample with ids outside of the vocabulary or places outside of its row, and for one with more or
    fewer labels than it says: the mean loss is over as many."""

    name: str
    made: Objective
    shape: SampleShape

    @property
    def needs(self) -> int:
        """Return how many tokens of a stream one sample of the user's training objective takes, at least 1."""
        return self._said("needs", 1)

    @property
    def reserved(self) -> int:
        """Return how many ids at the top of the vocabulary the user's training objective reserves for itself."""
        return self._said("reserved", 0)

    def samples(self, stream: Any) -> int:
        """Return how many training samples the user's objective makes of a stream of tokens."""
        return self._said("samples", -1, stream)

    def predicted(self, stream: Any, index: Ints) -> int:
        """Return how many labels that are not padding the user's objective counts in samples `index`."""
        return self._said("predicted", 0, stream, index)

    def batch(self, stream: Any, index: Ints, keys: Keys) -> dict[str, Ints]:
        """Return samples `index` of a token stream as data tensors by name, made by the user's training objective and
        checked. Raises ConfigError for illegal samples. `keys`: the random key of each sample."""
        with of_objective(self.name):
            found = dict(self.made.batch(stream, index, keys))
            for name, most in self._limits.items():
                if name in found:
                    self._check(name, np.asarray(found[name]), most, index)
            labels = np.asarray(found.get("labels", ()))
            if labels.shape == (len(index), self.shape.length):
                self._check_predicted(stream, index, (labels >= 0).sum(1))
        return found

    @property
    def _limits(self) -> dict[str, int]:
        """Return data tensor -> bound of its integers in samples: legal are [0, bound), and -1 for padding."""
        ids, places = ("tokens", "labels", "source"), ("begins", "positions")
        segments = {"segments": self.shape.segments} if self.shape.segments else {}
        return dict.fromkeys(ids, self.shape.vocab) | dict.fromkeys(places, self.shape.length) | segments

    def _check(self, name: str, rows: Any, most: int, index: Ints) -> None:
        """Raise ConfigError if data tensor `name` of the user's objective is illegal: `rows` must be one row of
        integers for each sample in `index`, each integer padding (-1) or in [0, most)."""
        of = f"data.objective={self.name}: "
        if rows.dtype.kind not in "iu" or rows.ndim != 2 or len(rows) != len(index):
            made = f"makes {name!r} as {rows.dtype} of shape {list(rows.shape)}"
            raise ConfigError(
                f"{of}{made} for {count_of(len(index), 'sample')}: rows of integers are needed, one for each"
            )
        if rows.size and (rows.min() < PADDING or rows.max() >= most):
            row, column = np.argwhere((rows < PADDING) | (rows >= most))[0]
            where = f"sample {index[row]} has {rows[row, column]} in {name!r}, at place {column}"
            raise ConfigError(f"{of}{where}: legal are 0 to {most - 1}, and -1 for padding")

    def _check_predicted(self, stream: Any, index: Ints, labels: Ints) -> None:
        """Raise ConfigError if `predicted` of the user's objective is not the number of labels that samples `index` of
        the token stream have, `labels` [len(index)]."""
        if self.predicted(stream, index) == labels.sum():
            return
        each = [self.predicted(stream, index[i : i + 1]) for i in range(len(index))]
        wrong = [i for i, said in enumerate(each) if said != labels[i]]
        of, there, said = f"samples {index[0]} to {index[-1]}", labels.sum(), self.predicted(stream, index)
        if wrong:
            of, there, said = f"sample {index[wrong[0]]}", labels[wrong[0]], each[wrong[0]]
        reason = f"{of}: {count_of(there, 'label')}, and predicted says {said}"
        raise ConfigError(f"data.objective={self.name}: {reason}; -1 is a label that is not predicted")

    def _said(self, what: str, least: int, *given: Any) -> int:
        """Return the integer `what` of the user's training objective, given `given`; ConfigError if not >= `least`."""
        with of_objective(self.name):
            value = getattr(self.made, what)
            value = value(*given) if given else value
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
                raise ConfigError(f"data.objective={self.name}: says {what}={value!r}; an integer >= {least} is needed")
            return int(value)


@contextmanager
def of_objective(name: str) -> Iterator[None]:
    """Raise ConfigError, naming data.objective, in place of any error of a user's own objective within the context."""
    if name in GIVEN:
        yield
        return
    try:
        with own_code(f"data.objective={name}", (ConfigError, OSError)):
            yield
    except OwnCodeError as error:
        raise ConfigError(f"data.objective={name}: {error}") from error


def word_of_objective(objective: Objective) -> str:
    """Return the word for a training objective in the keys of cache entries; of a user's own, the name of its class."""
    made = objective.made if isinstance(objective, OwnObjective) else objective
    return _WORDS.get(type(made), type(made).__name__)
