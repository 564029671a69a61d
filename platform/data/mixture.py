"""Mixtures: several sources of data in one global order of samples, each with its share of them.

A share is an integer; of every sum of the shares' worth of samples in a row, each source has as many as its share says.
The samples of a source come in the order that they would have without the others. The global order is a pure function
of (seed, epoch, index), with random access and no stored state (`permute_indices`).
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from platform.boundary.refusals import closest_values, format_violation, refuse_all, rephrase_refusals
from platform.boundary.schema import fits_type
from platform.config.fields import KEYS, Data, read_declared_types, violations_of_value
from platform.config.key import describe_type

_FINEST = 1 << 20  # parts into which weights are rounded
_GOLDEN = 648056  # of _FINEST parts, by the golden section: multiples of it are spread evenly
_MOST = 100  # sources
_LARGEST = 1 << 62  # sum of shares
_EXACT = 1 << 31  # a sum of shares up to which 64 bits hold all products
# Keys of group data that a source of a mixture may have; the mixture as a whole has the others.
OWN = (
    *("kind", "path", "field", "target_path", "target_field", "input_field"),
    *("dtype", "validation", "validation_path", "streaming", "settings"),
)
PATH_OPTIONS = [name for name in OWN if KEYS[f"data.{name}"].path is not None]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DataSource:
    """Single source of a corpus: the keys of group data as if it were the only one, and how much of the samples it
    has."""

    name: str  # "" if it is the only one
    data: Data
    weight: float = 0.0  # its part of the samples, relative to the others'; 0: as its size and `epochs` say
    epochs: float = 1.0  # how often it is read while the others are read as often as theirs say

    @property
    def is_trained(self) -> bool:
        """Return True if this data source has training samples, False if it is held out for validation as a whole."""
        return self.data.validation < 1

    @property
    def config_key(self) -> str:
        """Return the configuration key of a data source: "data", or "data.sources.NAME" in a mixture."""
        return f"data.sources.{self.name}" if self.name else "data"


def list_sources(data: Data) -> list[DataSource]:
    """Return the data sources that a corpus is made of, in the order of the configuration: the mixture's, or a single
    one without a name. Raises ConfigError with all mistakes in the sources of a mixture."""
    if data.kind != "mixture":
        return [DataSource("", data)]
    lines = [line for name, options in data.sources.items() for line in _violations_of_source(name, options)]
    if not data.sources:
        lines = ["data.sources: data=mixture needs sources, such as data.sources.web.path=FILE"]
    elif len(data.sources) > _MOST:
        lines = [f"data.sources: {len(data.sources)} sources, of which there may be {_MOST}"]
    if not lines:
        sources = [_build_source(name, options, data) for name, options in data.sources.items()]
        trained = [source for source in sources if source.is_trained]
        weighted = [source for source in trained if source.weight]
        if not trained:
            lines = ["data.sources: all of them are held out (validation=1), and none is left to train on"]
        elif weighted and len(weighted) < len(trained):
            without = next(source for source in trained if not source.weight)
            lines = [f"{without.config_key}.weight: must be given, as {weighted[0].config_key}.weight is"]
        elif len(trained) > 1 and not weighted and (streamed := [s for s in trained if s.data.streaming]):
            reason = f"must be given, as {streamed[0].config_key} is streamed"
            lines = [f"{source.config_key}.weight: {reason}" for source in trained]
    refuse_all(lines)
    return sources


def _build_source(name: str, options: Mapping[str, Any], data: Data) -> DataSource:
    """Construct source `name` of a data mixture: keys that are not `options` to it come from the mixture, `data`."""
    data_options = {key: value for key, value in options.items() if key in OWN}
    weighed = {key: float(options[key]) for key in ("weight", "epochs") if key in options}
    return DataSource(name, replace(data, **{"kind": "text", **data_options}, sources={}), **weighed)


def _violations_of_source(name: str, options: Any) -> list[str]:
    """Return a refusal line for each mistake in `options`, the keys (path, weight, ...) of source `name` of a data
    mixture."""
    key = f"data.sources.{name}"
    if name_violations := _violations_of_name(name):
        return name_violations
    if not isinstance(options, Mapping):
        return [format_violation(key, options, "must be keys with values", [f"{key}.path=FILE"])]
    lines, (types, _) = [], read_declared_types(Data)
    for option, value in options.items():
        option_key = f"{key}.{option}"
        if option in ("weight", "epochs"):
            if not fits_type(value, float) or not 1e-9 <= value <= 1e9:
                lines.append(format_violation(option_key, value, "must be a number from 1e-9 to 1e9", [1]))
        elif option not in OWN:
            near = [f"{key}.{name}" for name in closest_values(option, [*OWN, "weight", "epochs"])[:3]]
            lines.append(format_violation(option_key, value, "unknown key", near))
        elif option == "kind" and value in ("mixture", "synthetic"):
            lines.append(format_violation(option_key, value, "no source of a mixture", ["text"]))
        elif not fits_type(value, types[option]):
            lines.append(format_violation(option_key, value, f"must be {describe_type(types[option])}"))
        elif option != "validation" or value != 1:
            usual_key = f"data.{option}"
            violations = violations_of_value(usual_key, value, KEYS[usual_key])
            lines += [f"{option_key}{line.removeprefix(usual_key)}" for line in violations]
    if {"weight", "epochs"} <= options.keys():
        lines.append(format_violation(f"{key}.epochs", options["epochs"], f"{key}.weight says how much of it is read"))
    if options.get("validation") == 1:
        read = (name for name in ("weight", "epochs") if name in options)
        reason = f"{key}.validation=1: all of it is held out"
        lines += [format_violation(f"{key}.{n}", options[n], reason) for n in read]
    return lines


def name_source_in_line(source: DataSource, line: str) -> str:
    """Replace the key "data.KEY" at the start of a refusal line by the data source's: "data.sources.NAME.KEY"."""
    return f"{source.config_key}.{line.removeprefix('data.')}" if line.startswith("data.") else line


def name_source_in_errors(source: DataSource) -> AbstractContextManager[None]:
    """Return a context in which a ConfigError names the data source's "data.sources.NAME.KEY", not "data.KEY"."""
    return rephrase_refusals(partial(name_source_in_line, source))


def paths_by_key(data: Data) -> dict[str, str]:
    """Return the paths and URLs in a data configuration: full key, such as "data.path" -> path, "" if unset."""
    paths = {f"data.{name}": getattr(data, name) for name in PATH_OPTIONS}
    for source, options in data.sources.items():
        if isinstance(options, Mapping) and not _violations_of_name(source):
            paths |= {f"data.sources.{source}.{name}": str(options[name]) for name in PATH_OPTIONS if name in options}
    return paths


def _violations_of_name(name: Any) -> list[str]:
    """Check the name of a source in a data mixture: return [a refusal line] if it is no identifier, else []."""
    if isinstance(name, str) and name.isidentifier():
        return []
    return [format_violation("data.sources", name, "the name of a source has letters, digits and _")]


def compute_shares(sources: Sequence[DataSource], samples_per_epoch: Sequence[int]) -> list[int]:
    """Return each data source's share of a mixture's training samples, as integers in lowest terms: in proportion to
    its weight or, without weights, to its epochs times `samples_per_epoch`, the number of samples that it has in one
    epoch; 0 for a held-out source."""
    if total := sum(source.weight for source in sources):
        shares = [max(1, round(source.weight / total * _FINEST)) for source in sources]
    else:
        exact = [Fraction(str(source.epochs)) * n for source, n in zip(sources, samples_per_epoch, strict=True)]
        scale = lcm(*(part.denominator for part in exact))
        shares = [max(1, int(part * scale)) for part in exact]
    shares = [share if source.is_trained else 0 for source, share in zip(sources, shares, strict=True)]
    shares = [share // gcd(*shares) for share in shares]
    if (share_sum := sum(shares)) > _LARGEST:  # more than 64 bits can count
        shares = [max(1, share * _LARGEST // share_sum) if share else 0 for share in shares]
    return shares


def deal_samples_to_sources(shares: Sequence[int], sample_numbers: ArrayLike) -> tuple[Ints, Ints]:
    """Deal the samples of a mixture's endless global order to its data sources: return, for each sample number in
    `sample_numbers`, the number of its source, and how many samples of that source come before it; int64, shaped as
    `sample_numbers`. `shares`: the shares of the sources; one of 0 gets none.

    Sample k goes to the first source if the first source's due, floor((k share + phase) / sum), rises with it; of the
    samples that are left, the second source gets its due in the same way, and so on. So each source's count is near its
    due at every place, and exact after each whole sum of the shares. Phases keep small sources from coming together.

    >>> deal_samples_to_sources([2, 1], range(6))[0].tolist()
    [0, 1, 0, 0, 1, 0]
    """
    if 0 in shares:
        some = [number for number, share in enumerate(shares) if share]
        source, count = deal_samples_to_sources([shares[number] for number in some], sample_numbers)
        return np.array(some)[source], count
    total, shape = sum(shares), np.shape(sample_numbers)
    sample_numbers = np.asarray(sample_numbers, np.int64).reshape(-1)
    rounds, place = np.divmod(sample_numbers, total)
    before, after = (np.asarray(x, object if total > _EXACT else None) for x in (place, place + 1))
    source = np.full(sample_numbers.shape, len(shares) - 1)
    count = np.zeros(sample_numbers.shape, np.int64)
    open_ = np.ones(sample_numbers.shape, bool)
    for number, share in enumerate(shares):
        phase = total * ((number + 1) * _GOLDEN % _FINEST) // _FINEST
        due, then = (before * share + phase) // total, (after * share + phase) // total
        taken = open_ & np.asarray(then > due, bool) if number < len(shares) - 1 else open_
        source[taken] = number
        count[taken] = (rounds * share + np.asarray(due, np.int64))[taken]
        open_ &= ~taken
        before, after, total = before - due, after - then, total - share
    return source.reshape(shape), count.reshape(shape)


_PERMUTATION_GOLDEN, _MULTIPLY_1, _MULTIPLY_2 = (
    np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (np.uint64(c) for c in (30, 27, 31))
_ROUNDS = 8  # of the Feistel network; with 4, the permutations of small ranges are measurably uneven


def hash_integers(*words: ArrayLike) -> NDArray[np.uint64]:
    """Hash integers (such as seed, epoch, sample) to 64 bits, elementwise with broadcasting: the random numbers of the
    data order and the objectives, without a generator's state. The hash is the finaliser of SplitMix64, once per
    word."""
    hashed: NDArray[np.uint64] = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        for word in words:
            z = (hashed ^ np.asarray(word).astype(np.uint64)) + _PERMUTATION_GOLDEN
            z = (z ^ (z >> _SHIFT_1)) * _MULTIPLY_1
            z = (z ^ (z >> _SHIFT_2)) * _MULTIPLY_2
            hashed = z ^ (z >> _SHIFT_3)
    return np.asarray(hashed)


def permute_indices(seed: int, epoch: ArrayLike, n: int, index: ArrayLike) -> NDArray[np.int64]:
    """Shuffle samples: map number `index` to its image in the permutation of [0, n) that `seed` and `epoch` give,
    elementwise with broadcasting.

    A Feistel network permutes [0, 4**half), the smallest such range that holds n. Applying it again to images outside
    [0, n) until all lie inside (cycle walking) makes it a permutation of [0, n); fewer than four rounds are expected.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)

    def apply_feistel_network(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Apply the Feistel network, which permutes sample numbers in [0, 4**half), to each number in `x`."""
        left, right = x >> shift, x & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (hash_integers(seed, epoch, turn, right) & mask)
        return (left << shift) | right

    index = np.asarray(index)
    assert np.all((index >= 0) & (index < n)), f"index outside [0, {n})"
    x = apply_feistel_network(index.astype(np.uint64))
    while np.any(outside := x >= n):
        x = np.where(outside, apply_feistel_network(x), x)
    return np.asarray(x).astype(np.int64)
