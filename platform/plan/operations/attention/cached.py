"""Keys and values from one pass to the next, where a text is written in several passes."""

from __future__ import annotations

from platform.plan.operations.op import Op


class RememberOp(Op):
    """Keys and values of all positions so far for the causal attention `name`, and their type: this pass's k and v, of
    type `kv`, behind the keys and values of the passes before; k and v themselves in a pass that reads a whole text, as
    in training."""

    def compose(self, ops, name, k, v, kv):
        return k, v, kv


class RecallOp(Op):
    """Keys and values of type `kv` of the cross-attention `name`: k and v, or where these are None, the pair of the
    first of several passes with the same memory."""

    def compose(self, ops, name, k, v, kv):
        return k, v
