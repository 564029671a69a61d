"""Keys and values from one pass to the next, where a text is written in several passes."""

from __future__ import annotations

from platform.plan.operations.op import Op


class RememberOp(Op):
    """Keys and values of all positions so far for the causal attention `name`, and their type: this pass's k and v, of
    type `kv`, behind those of the passes before; of a pass that reads a whole text, as in training, k and v
    themselves."""

    def compose(self, ops, name, k, v, kv):
        return k, v, kv


class RecallOp(Op):
    """Keys and values of type `kv` of the cross-attention `name`: k and v, or those of the first of several passes with
    the same memory, where these are None."""

    def compose(self, ops, name, k, v, kv):
        return k, v
