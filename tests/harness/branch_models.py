"""Small models of branches, each between an embedding and a head over vocab (model.heads branches of width model.d_kv):

resnext   cardinality branches of bottleneck projections, summed, with a residual connection (Xie et al. 2017)
mixed     the same with a function of its own in every branch
grouped   branches that read slices of x and are concatenated: a grouped projection
heads     multi-head attention as branches over the dim `heads`: equal to platform.model.attention.Attention
summed    a linear layer cut into slices and summed: the SUMMA remark of Jain et al.
unlike    branches of other widths and depths each, on a sub-grid each or several
"""

from __future__ import annotations

from functools import partial
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model import register_model
from platform.model.attention import Attention
from platform.model.branches import Branches, FeedForwardBranch, UnlikeBranches, pointwise_per_branch
from platform.model.layers import STD, Layer, StackSpecs, dim_sizes
from platform.model.transformer import Embedding, Head, embedding_table
from platform.plan.model_types import Spec

FUNCTIONS = ("gelu", "relu", "silu", "tanh")
INNER = Spec.of("mlp", "length batch branch d_branch")
STREAM = StackSpecs().stream


class Branched(Layer):
    """Embedding, one block of branches, head. `forward` as a decoder's."""

    inputs = ("tokens", "labels")

    def __init__(self, c: ModelConfig):
        self.config = c
        self.sizes = {**dim_sizes(c), "branch": c.heads, "d_branch": c.d_kv}
        self.table = embedding_table(c)
        self.embedding = Embedding("", c, StackSpecs(), self.table)
        self.head = Head(c, StackSpecs(), self.table)
        self.branches = self.block(c)

    def block(self, c: ModelConfig) -> Any:
        return Branches("block", STREAM, INNER, STREAM, std=STD)

    def forward(self, ops, inputs):
        x = self.embedding(ops, inputs["tokens"])
        return self.head.compute_loss(ops, self.branched(ops, x), inputs["labels"])

    def branched(self, ops, x):
        return ops.pointwise("add", x, self.branches(ops, x, lambda ops, h: ops.pointwise("relu", h)))


class Mixed(Branched):
    def branched(self, ops, x):
        functions = [FUNCTIONS[i % len(FUNCTIONS)] for i in range(self.config.heads)]
        return ops.pointwise("add", x, self.branches(ops, x, pointwise_per_branch(functions, INNER)))


class Grouped(Branched):
    """d_model = branches x d_branch, on either side."""

    def block(self, c):
        part = Spec.of("mlp", "length batch branch d_part")
        self.sizes["d_part"] = c.d_model // c.heads
        return Branches("block", STREAM, INNER, STREAM, slices=part, join="concatenate", std=STD)


class Summed(Branched):
    def block(self, c):
        part = Spec.of("mlp", "length batch branch d_branch")
        return Branches("block", STREAM, part, STREAM, projections=(), slices=part, std=STD)

    def branched(self, ops, x):
        return self.branches(ops, x)


class Heads(Branched):
    """Attention as in blocks.Attention without norms, biases and residual connection."""

    def block(self, c):
        query = StackSpecs().query
        self.scale = Attention("layers.0.attention", c, StackSpecs(), causal=True).scale
        names = ("query", "key", "value")
        out_std = STD / (2 * c.layers) ** 0.5
        more = {"dim": "heads", "projections": names, "std": STD, "out_std": out_std}
        return Branches("layers.0.attention", STREAM, query, STREAM, **more)

    def branched(self, ops, x):
        core = StackSpecs().core_query
        query = StackSpecs().query

        def inside(ops, q, k, v):
            q, k, v = (ops.relayout(f"core.{n}", t, query, core) for n, t in (("q", q), ("k", k), ("v", v)))
            a = ops.attention("attention", q, k, v, core, core, scale=self.scale, causal=True)
            return ops.relayout("core.context", a, core, query)

        return self.branches(ops, x, inside)


class Plain(Branched):
    """What `heads` is equal to: the attention of platform.model.attention, alone."""

    def block(self, c):
        return Attention("layers.0.attention", c, StackSpecs(), causal=True)

    def parameters(self):
        weights = [self.branches.query, self.branches.key, self.branches.value, self.branches.output]
        return list(dict.fromkeys([*self.embedding.parameters(), *weights, *self.head.parameters()]))

    def branched(self, ops, x):
        block = self.branches
        block.prepare_input, block.add_to_stream = (lambda ops, x: x), (lambda ops, x, y, following: y)
        return block(ops, x)


WIDTHS = [(64,), (16, 8), (32,), (8, 8, 8), (24,)]  # of the feed-forward layers of each branch that is not as others


class Unlike(Branched):
    def block(self, c):
        builders = [partial(FeedForwardBranch, f"block.{i}", STREAM, w, std=STD) for i, w in enumerate(WIDTHS)]
        return UnlikeBranches("block", STREAM, builders, self.sizes)

    def branched(self, ops, x):
        return ops.pointwise("add", x, self.branches(ops, x))


MODELS = {"resnext": Branched, "mixed": Mixed, "grouped": Grouped, "summed": Summed, "heads": Heads, "plain": Plain}
MODELS["unlike"] = Unlike
for kind, model in MODELS.items():
    register_model(kind, model)
