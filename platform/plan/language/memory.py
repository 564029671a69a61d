"""Memory of attention from one pass to the next, where a text is written in several passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


class Memory:
    """Part of `Ops` that a pass of generation replaces: where a pass reads a whole text, as in training, there is
    nothing to remember. `kv` and `spec` are types of activations (`Spec`)."""

    def remembered(self, spec: Any) -> Any:
        """Return the type of all keys or values that causal attention reads, where this pass makes those of type
        `spec`: the same, unless passes before have made others."""
        return spec

    def remember(self, name: str, k: Any, v: Any, kv: Any) -> tuple[Any, Any, Any]:
        """Return the keys and values of all positions so far for the causal attention `name`, and their type
        `remembered(kv)`: this pass's k and v, of type `kv`, behind those of the passes before."""
        return k, v, kv

    def recall(self, name: str, k: Any, v: Any, kv: Any) -> tuple[Any, Any]:
        """Return the keys and values of type `kv` of the cross-attention `name`: k and v, or those of the first of
        several passes with the same memory, where these are None."""
        return k, v


def lengthened(spec: Any, length: int) -> Any:
    """Return the type of an activation whose dim length has another size."""
    return replace(spec, sizes=(*(pair for pair in spec.sizes if pair[0] != "length"), ("length", length)))
