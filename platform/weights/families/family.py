"""Family of models that transformers and we know, as data: keys of its config.json, names of its tensors; and what
several families have in common.

A tensor of theirs is one of ours, flattened to a matrix [what its product adds, what it contracts], or several of ours
one after another, or a row of each in turn (`alternate`); GPT-2's are stored the other way round (`turned`). `{i}` is
the number of a layer, `{e}` the number of an expert. A parameter of experts is a matrix for each: a tensor with `{e}`
in its name holds the matrix of one, a tensor without stacks the matrices of all. Rows are in the order in which
transformers writes them; a row of parameters that a model lacks counts for nothing in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from platform.weights.families.keys import Only, Rule


class TensorRow(NamedTuple):
    """Name of a Hugging Face tensor, and of our parameters that it holds, one after another, or one after another for
    each head (`by_head`), or a row of each in turn (`alternate`). `turned`: it is stored as [what it contracts, what it
    adds]; `gated`: it is there only where feed-forward layers have a gate (True), or none (False)."""

    theirs: str
    ours: tuple[str, ...]
    turned: bool = False
    gated: bool | None = None
    alternate: bool = False
    by_head: bool = False


@dataclass(frozen=True)
class Family:
    """Family of models: `architecture` is the class that has all tensors, others that may be `read` have more or fewer.

    `fixed`: our model keys that are alike in the whole family; what neither they nor `rules`, for the keys of
    config.json, say is at its default. `rows`: rows of tensors; `prefix`: optional beginning of names, missing as where
    the class without a head was saved; `same`: names that repeat another tensor (tied); `buffers`: names of tensors
    that are no parameters, and are not read; `fused`: other rows, in which a layer's experts are stacked.
    """

    name: str
    architecture: str
    read: Sequence[str]
    fixed: Mapping[str, Any]
    rules: Sequence[Rule]
    rows: Sequence[TensorRow]
    prefix: str
    same: Mapping[str, str] = field(default_factory=dict)
    buffers: Sequence[str] = ()
    fused: Sequence[TensorRow] = ()


def modules(names: Mapping[str, str], turned: bool = False) -> Iterator[TensorRow]:
    """Yield a model family's table rows for weight and bias of modules; `names`: transformers' name -> ours."""
    for theirs, ours in names.items():
        endings = (".gain", ".bias") if ours.endswith("norm") else ("", "_bias")
        for kind, ending in zip(("weight", "bias"), endings, strict=True):
            held = tuple(f"{name}{ending}" for name in ours.split())
            yield TensorRow(f"{theirs}.{kind}", held, turned and kind == "weight")


ONE_STACK = Only("is_encoder_decoder", (False,), written=False)

PLAIN = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}
PLAIN |= {"gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "swish": "silu"}
GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_new": "geglu_tanh", "relu": "reglu"}
GATED |= {"swish": "swiglu", "gelu_python": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_fast": "geglu_tanh"}


def special_tokens(begin: int | None, end: int | None, pad: int | None = None) -> dict[str, Any]:
    """Return a model family's defaults in config.json: the keys for ids of special tokens, and use_cache."""
    return {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad, "use_cache": True}
