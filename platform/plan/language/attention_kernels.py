"""Kernels of fused attention by name, and which of them computes which attention on which kind of device.

The rules follow scaled_dot_product_attention in torch 2.13 (aten/src/ATen/native/transformers, sdp_utils).
Statements about GPUs hold for the newest ones: an older GPU may take less, which its worker finds out before the run
forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

AUTO, MATH = "auto", "math"
KERNELS = (AUTO, "flash", "cudnn", "efficient", MATH)
PREFERRED = {"cpu": ("flash",), "cuda": ("cudnn", "flash", "efficient")}  # by torch under `auto`, first to last


@dataclass(frozen=True)
class AttentionTraits:
    """All of one fused attention on which depends whether a kernel computes it. `bias`: a learned bias is added to the
    scores; `mask`: padding, what lies before a window or in other documents is hidden; `dropout`: probability with
    which the kernel drops; `grouped`: K and V come with fewer heads than Q; `deterministic`: sums are to be taken in a
    fixed order; `d_value`: the d_kv of V if it is another, else 0."""

    precision: str
    d_kv: int
    bias: bool = False
    mask: bool = False
    dropout: float = 0.0
    grouped: bool = False
    deterministic: bool = False
    d_value: int = 0

    @property
    def wide(self) -> bool:
        """Return True if the attention computes in a type of more than 16 bits."""
        return self.precision in ("fp32", "fp64")


# (kernels, kind of device, the attention that they refuse there, why)
_REFUSED: tuple[tuple[tuple[str, ...], str, Callable[[AttentionTraits], object], str], ...] = (
    (("cudnn", "efficient"), "cpu", lambda t: True, "does not run"),
    (("flash",), "cpu", lambda t: t.dropout, "draws no dropout masks, as model.fused_dropout=true asks for"),
    (("flash",), "cpu", lambda t: t.bias, "has no gradient for a learned bias, as of model.positions=relative"),
    (("cudnn",), "cuda", lambda t: t.bias, "has no gradient for a learned bias, as of model.positions=relative"),
    (("flash",), "cuda", lambda t: t.bias or t.mask, "takes neither a bias nor a mask of padding, window or documents"),
    (("flash", "cudnn"), "cuda", lambda t: t.wide, "computes in 16 bits: precision=bf16 or fp16"),
    (("efficient",), "cuda", lambda t: t.precision == "fp64", "does not compute in fp64"),
    *((("flash",), kind, lambda t: t.d_value, "takes values as wide as keys: model.d_value=0") for kind in PREFERRED),
    (("flash", "cudnn"), "cuda", lambda t: t.d_kv > 256, "takes a d_kv of at most 256"),
    (("cudnn",), "cuda", lambda t: (t.d_kv | t.d_value) % 8, "takes a d_kv that is a multiple of 8"),
    (
        ("efficient",),
        "cuda",
        lambda t: (t.d_kv | t.d_value) % (4 if t.wide else 8),
        "takes a d_kv that is a multiple of 8 (fp32: 4)",
    ),
    (("efficient",), "cuda", lambda t: t.grouped, "takes as many heads of K and V as of Q: model.kv_heads=0"),
    (("cudnn",), "cuda", lambda t: t.dropout * 16 % 1, "drops with multiples of 1/16: model.dropout=0.0625 or 0.125"),
    (("cudnn",), "cuda", lambda t: t.deterministic, "adds gradients in no fixed order: train.deterministic=true"),
)


def reason_against(kernel: str, device: str, traits: AttentionTraits) -> str:
    """Return why a kernel cannot compute an attention on a kind of device (cpu, cuda), as a predicate; "" if it can, as
    `auto` and `math` always do."""
    rules = ((refuses, why) for kernels, where, refuses, why in _REFUSED if kernel in kernels and where == device)
    return next((why for refuses, why in rules if refuses(traits)), "")


def chosen(kernel: str, device: str, traits: AttentionTraits) -> str:
    """Return the kernel that computes an attention on a kind of device: the named one, or torch's under `auto`."""
    if kernel != AUTO:
        return kernel
    return next((k for k in PREFERRED[device] if not reason_against(k, device, traits)), MATH)
