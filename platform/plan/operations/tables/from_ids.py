"""Activations that are made of a data tensor of ids alone: every rank makes its block from its own block of the ids,
and nothing moves. Like every activation of a plan they take a gradient, as if there were layers below."""

from __future__ import annotations

from math import prod

from platform.plan.operations.op import Op

_DRAWN = 11  # 64-bit numbers per element alive while normal ones are drawn (platform.parallel.kernels.random)


class OneHotOp(Op):
    """Activation `out` [length batch dim] that is 1 where the index along `dim` equals the data tensor `ids` [length,
    batch], else 0; where `ids` is padding it is 0 everywhere. An einsum with it selects rows of an activation; `lookup`
    does so of a parameter without materialising it."""

    def record(self, ops, name, ids, out):
        return ops.record(self.kind, name, [], [], [out], [ids])

    def run(self, ops, name, ids, out):
        """Compute the one-hot activation of this rank's token ids: 1 at the index that equals the id."""
        return _of_ids(ops, ids[self.kind, name], out, lambda ids, column: ids == column)

    def meter(self, ops, name, ids, out):
        """Count the memory of a one-hot activation of token ids."""
        return ops.block(out)


class FeaturesOp(Op):
    """Activation `out` [length, batch, one dim] of standard normal numbers, fixed by the ids in the data tensor `ids`
    [length, batch] and not learned: an input for models without an embedding table."""

    def record(self, ops, name, ids, out):
        return ops.record(self.kind, name, [], [], [out], [ids])

    def run(self, ops, name, ids, out):
        """Draw standard normal features for this rank's token ids, a function of the id alone, alike on all ranks."""
        random = ops.kernels.random
        size, key = ops.plan.sizes[out.dims[-1]], random.key("features", name)
        return _of_ids(ops, ids[self.kind, name], out, lambda ids, column: random.normal(key, ids * size + column))

    def meter(self, ops, name, ids, out):
        """Count the bytes of features drawn for token ids, and of the random integers that they are drawn from."""
        ops.integers(prod(ops.plan.local_shape(out)) * ops.plan.present(out, ops.at) * _DRAWN)
        return ops.block(out)


def _of_ids(ops, ids, out, compute):
    """Make an activation of token ids: return compute(ids [length, batch, 1], global positions along the last dim of
    `out`) on this rank's block, in the parameters' dtype."""
    dtype = next(iter(ops.tensors.values())).dtype
    if not ops.absent(ids):
        ids = compute(ids.unsqueeze(-1), ops.positions(out, out.dims[-1], ids.device))
    return ids.to(dtype).requires_grad_()
