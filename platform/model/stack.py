"""Stack of Transformer blocks, with what they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model.blocks import STD, Layer, Norm, StackSpecs, TransformerBlock, keys_and_values
from platform.plan.language.ops import Parameter, scores_of
from platform.plan.operations.words import Ops


class Stack(Layer):
    """Sequence of Transformer blocks with what they share: the relative position bias (T5) and the final norm, which a
    post-norm stack lacks because every layer ends with a norm. `units`: the names of the blocks."""

    def __init__(
        self, prefix: str, c: ModelConfig, shapes: StackSpecs, *, causal: bool, memory: StackSpecs | None = None
    ):
        """Construct the c.layers Transformer blocks of a stack, whose weights' names start with `prefix`. `shapes`:
        the Specs of its activations; `causal`: True if a token sees only earlier ones; `memory`: the Specs of the
        encoder's stack that the blocks attend to, None for a stack without cross-attention."""
        self.config, self.shapes, self.causal = c, shapes, causal
        table = Parameter(f"{prefix}relative_bias", ("buckets", "heads"), "in", std=STD)
        self.relative = table if c.positions == "relative" else None
        names = [f"{prefix}layers.{i}" for i in range(c.layers)]
        more: dict[str, Any] = {"causal": causal, "memory": memory}
        self.blocks = {
            n: TransformerBlock(n, c, shapes, window=window_of(c, i), experts=has_experts(c, i), **more)
            for i, n in enumerate(names)
        }
        self.units = tuple(names)
        self.norm = None if c.post_norm else Norm.of(f"{prefix}norm", c)

    def __call__(
        self,
        ops: Ops,
        x: Any,
        units: Sequence[str],
        *,
        mask: Any = None,
        begins: Any = None,
        memory: Any = None,
        memory_mask: Any = None,
        tokens: Any = None,
        auxiliary: Any = None,
    ) -> tuple[Any, Any]:
        """Run the Transformer blocks of this stack that are named in `units` on the residual stream x, and the final
        norm after the stack's last block; x is returned unchanged if `units` names none of its blocks. `mask` hides the
        padding of x, `begins` what lies before a document, `memory_mask` the padding of the encoder's output `memory`;
        all are data tensors. Without a `memory` cross-attention recalls the memory of an earlier pass.

        Return the stream, and the sum [length, batch] of `auxiliary`, the tokens' losses in the blocks before, and of
        those in these blocks; None for none. `tokens`: see `Experts`."""
        s, blocks = self.shapes, [block for name, block in self.blocks.items() if name in units]
        if not blocks:
            return x, auxiliary
        bias = None
        if self.relative:
            options: Mapping[str, Any] = {"bidirectional": not self.causal, "distance": self.config.distance}
            keys = ops.remembered(s.core_query) if self.causal else s.core_query
            bias = ops.relative_bias(self.relative, scores_of(s.core_query, keys), **options)
        crossing = [block.cross for block in blocks if block.cross and memory is not None]
        pairs = keys_and_values(ops, crossing, memory) if crossing else [(None, None)] * len(blocks)
        every = ops.recompute.every
        for i in range(0, len(blocks), every):
            together = blocks[i : i + every]

            def run(x: Any, bias: Any, *kv: Any, together: Sequence[TransformerBlock] = together) -> Any:
                """Run the blocks `together` on the stream x; return it, beside the sum of their auxiliary losses if
                there are any. `kv`: keys and values of their cross-attention."""
                total = None
                for block, pair in zip(together, zip(kv[::2], kv[1::2], strict=True), strict=True):
                    x, loss = block(
                        ops, x, pair, mask=mask, begins=begins, bias=bias, memory_mask=memory_mask, tokens=tokens
                    )
                    x, total = ops.watch(block.name, x, s.stream), _sum(ops, total, loss)
                return x if total is None else (x, total)

            kv = [x for pair in pairs[i : i + every] for x in pair]
            found = ops.recomputed("full", together[0].name, run, s.stream, x, bias, *kv)
            x, loss = found if isinstance(found, tuple) else (found, None)
            auxiliary = _sum(ops, auxiliary, loss)
        return self.norm(ops, x, s.stream) if self.norm and self.units[-1] in units else x, auxiliary


def _sum(ops: Ops, one: Any, other: Any) -> Any:
    """Return the sum of two activations, of which any may be None for nothing."""
    return (
        ops.pointwise("add", one, other) if one is not None and other is not None else one if other is None else other
    )


def has_experts(c: ModelConfig, layer: int) -> bool:
    """Return True if Transformer layer number `layer` has experts: every model.experts_every-th has."""
    return c.experts > 0 and (layer + 1) % c.experts_every == 0


def window_of(c: ModelConfig, layer: int) -> int:
    """Return the attention window of Transformer layer number `layer`, in tokens; 0 if it sees the whole sequence."""
    windowed = c.window < c.length and (not c.window_layers or layer in c.window_layers)
    return c.window if windowed else 0
