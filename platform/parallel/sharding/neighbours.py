"""Parameters that lie one after another in a bucket, so that one product computes with all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from platform.parallel.sharding.flat import FlatBucket, bucket_of


class Neighbours(NamedTuple):
    """Parameters whose compute copies lie one after another in a bucket."""

    bucket: FlatBucket
    names: tuple[str, ...]

    @classmethod
    def of(cls, leaves: Sequence[Tensor | None]) -> Neighbours | None:
        """Return parameters as neighbours in one flat bucket; None if fewer than two, not adjacent, or absent here."""
        found = [bucket_of(w) for w in leaves if w is not None]
        flats, names = [f[0] for f in found if f], tuple(f[1] for f in found if f)
        if len(flats) < max(2, len(leaves)) or any(flat is not flats[0] for flat in flats) or not flats[0].here:
            return None
        return cls(flats[0], names) if flats[0].bucket.stretch(names) else None

    @property
    def values(self) -> Tensor:
        """Return the flat compute copies of these adjacent parameters, one stretch of the bucket's buffer."""
        return self.bucket.values(*self.names)

    def add(self, compute: Callable[[Tensor, bool], Tensor]) -> None:
        """Add gradients of adjacent parameters to their flat bucket: `compute(memory, fresh)` does so in one kernel."""
        compute(*self.bucket.sum_of(*self.names))
        self.bucket.came(*self.names)

    def add_total(self, total: Callable[..., Tensor]) -> None:
        """Add small gradients of adjacent parameters (biases), which `total(dtype=...)` computes as one flat tensor."""
        ranges = [self.bucket.bucket.ranges[name] for name in self.names]
        parts = total(dtype=self.bucket.adds_in).split([stop - start for start, stop in ranges])
        for name, part in zip(self.names, parts, strict=True):
            self.bucket.add(name, part)
