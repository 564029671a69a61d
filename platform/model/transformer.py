"""Base classes of Transformers: of all of them, and of the ones with a single stack of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model.blocks import Activations, Layer, Stack, StackSpecs, dim_sizes
from platform.model.ends import Embedding, Head, embedding_table, restarts
from platform.plan.operations.words import Ops


class Transformer(Layer):
    """Base of Transformers with one table of token embeddings. `units`: the names of the smallest parts (embeddings,
    blocks, head) that pipeline stages are made of, in order."""

    inputs: tuple[str, ...] = ("tokens", "labels")
    units: tuple[str, ...]

    def __init__(self, c: ModelConfig):
        self.config, self.sizes, self.table = c, dim_sizes(c), embedding_table(c)

    def forward(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        return self.part(ops, inputs, {}, self.units)["loss"]

    def part(self, ops: Ops, inputs: Mapping[str, Any], flow: Mapping[str, Any], units: Sequence[str]) -> Activations:
        """Run the parts of the model named in `units`, one pipeline chunk, on `flow`, the activations by name from the
        units before; return those for the units after. The head returns the `loss` if `inputs`, the data tensors by
        name, have labels, else `logits` [length, batch, vocab] in its region's layout."""
        raise NotImplementedError


class SingleStack(Transformer):
    """Base of Transformers with one stack of blocks, `causal` or reading in both directions except for padding. Beside
    tokens and labels it may read `begins`, where the document of each token begins, `positions`, how far from there the
    token is, and `segments`."""

    causal: bool

    def __init__(self, c: ModelConfig):
        super().__init__(c)
        more = {"begins": c.within_documents, "positions": restarts(c), "segments": bool(c.segments)}
        self.inputs = (*Transformer.inputs, *(name for name, read in more.items() if read))
        shapes = StackSpecs()
        self.embedding = Embedding("", c, shapes, self.table)
        self.stack = Stack("", c, shapes, causal=self.causal)
        self.head = Head(c, shapes, self.table)
        self.units = ("embedding", *self.stack.units, "head")

    def part(self, ops: Ops, inputs: Mapping[str, Any], flow: Mapping[str, Any], units: Sequence[str]) -> Activations:
        beside = inputs.get("segments"), inputs.get("positions")
        x = self.embedding(ops, inputs["tokens"], *beside) if "embedding" in units else flow["stream"]
        x = self.stack(ops, x, units, mask=None if self.causal else inputs.get("tokens"), begins=inputs.get("begins"))
        return self.head(ops, x, inputs.get("labels")) if "head" in units else {"stream": x}
