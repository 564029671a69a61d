"""Example of Mesh-TensorFlow (Shazeer et al. 2018, section 8): y = relu(x w + bias) v, two fully connected layers."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.plan.language.ops import Parameter, Spec
from platform.plan.operations.words import Ops

IO = Spec.of("stream", "length batch io")
HIDDEN = Spec.of("mlp", "length batch hidden")


class TwoLayer:
    """Regression model of Mesh-TensorFlow's example: `forward` maps ids [length, batch] to half the summed squared
    error of y against |x|, where x are fixed random features of the ids.

    hidden = 2 io units can represent |x| = relu(x) + relu(-x) exactly. The paper's batch is length x batch here; the
    shipped configuration has length 1. Labels are not read.
    """

    inputs = ("tokens",)

    def __init__(self, c: ModelConfig):
        """Construct the two weight matrices and the bias of the two-layer example model, and the sizes of its dims."""
        self.sizes = {"length": c.length, "io": c.io, "hidden": c.hidden, "vocab": c.vocab}
        self.w = Parameter("w", ("io", "hidden"), "in", std=1 / sqrt(c.io), decay=True)
        self.bias = Parameter("bias", ("hidden",), "in", "zeros")
        self.v = Parameter("v", ("hidden", "io"), "out", std=1 / sqrt(c.hidden), decay=True)

    def parameters(self) -> list[Parameter]:
        """Return the two-layer example model's declared weights: first matrix w, its bias, second matrix v."""
        return [self.w, self.bias, self.v]

    def forward(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        """Return the example model's loss: half the summed squared error of y against |x|, x random features of ids."""
        x = ops.features("x", inputs["tokens"], IO)
        (h,) = ops.project(x, IO, (self.w,), (HIDDEN,), (self.bias,))
        (y,) = ops.project(ops.pointwise("relu", h), HIDDEN, (self.v,), (IO,))
        return ops.squared_error("loss", y, ops.pointwise("absolute", x), IO, inputs["tokens"])
