"""Types of what a model is written in: activations, parameters, and the operations that are recorded of it.

A model's forward is written once against `platform.plan.operations.registry.Ops`. Run with
`platform.plan.operations.recorder.Recorder` it yields the operations with their dims, which become part of the plan;
run with `platform.runtime.parallel_ops.ParallelOps` it computes. The type of an activation is its `Spec`: its region
and dims, from which a scheme derives its layout.

Data tensors (token ids, labels) are named tensors of integers [length, batch] whose negative entries are padding. Every
rank loads the block that an operation needs, so data never travels between ranks.

Functions that operations apply are data too: pointwise ones by name, `RotaryScaling`, `Router`, `LabelLoss`; and so are
the kernels of fused attention, of which `resolve_auto_kernel` chooses one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any


@dataclass(frozen=True)
class BranchPlace:
    """Place of a tensor among branches of a model that are not alike: the `number` of its branch, and the `costs` of
    all branches, by which they are dealt to sub-grids."""

    number: int
    costs: tuple[int, ...]

    def find_sub_grid(self, sub_grids: int) -> int:
        """Return the number of the sub-grid, of so many, on which this branch is computed."""
        return deal_branches(self.costs, sub_grids)[self.number]


@cache
def deal_branches(costs: tuple[int, ...], sub_grids: int) -> tuple[int, ...]:
    """Return the sub-grid of each branch of a model: the costliest branch is dealt first, each to the sub-grid that has
    least so far (longest processing time). Sub-grid 0 is the busiest, by which a plan is priced.

    >>> deal_branches((3, 5, 1, 2), 2)
    (1, 0, 0, 1)
    """
    loads, dealt = [0] * sub_grids, dict[int, int]()
    for branch in sorted(range(len(costs)), key=lambda branch: (-costs[branch], branch)):
        dealt[branch] = min(range(sub_grids), key=loads.__getitem__)
        loads[dealt[branch]] += costs[branch]
    by_load = sorted(range(sub_grids), key=lambda sub_grid: (-loads[sub_grid], sub_grid))
    return tuple(by_load.index(dealt[branch]) for branch in range(len(costs)))


@dataclass(frozen=True)
class Spec:
    """Type of an activation: its region and its dims in memory order.

    `sizes`: sizes of the dims that differ from the model's, such as the length of an encoder's input. A layout
    depends on the name of a dim alone, as in Mesh-TensorFlow. `dtype`: compute or accumulate, as in Collective; a
    product whose result is of the latter is computed in it (a router's scores). `open`: its sums over ranks
    are left to an operation that is linear in it: of its `value` to the reader, of its `gradient` to the maker.
    `place`: the branch that it is in, of several that are not alike; None for one of the whole model.
    """

    region: str
    dims: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    dtype: str = "compute"
    open: str = ""
    place: BranchPlace | None = None

    @classmethod
    def of(cls, region: str, dims: str, sizes: tuple[tuple[str, int], ...] = (), dtype: str = "compute") -> Spec:
        """Build the type of an activation from its region and its dims in one text, such as "length batch d_model"."""
        return cls(region, tuple(dims.split()), sizes, dtype)

    def rename_dim(self, old: str, new: str) -> Spec:
        """Return the type of the same activation with its dim `old` called `new`."""
        return _rename_dim(self, old, new)

    def __str__(self) -> str:
        """Format this type of an activation as "region[dim dim ...]", then its dtype and `open`, if not the usual."""
        dtype = f" {self.dtype}" if self.dtype != "compute" else ""
        branch = f" of branch {self.place.number}" if self.place else ""
        return f"{self.region}[{' '.join(self.dims)}]{dtype}" + (f" of open {self.open}" if self.open else "") + branch


@cache  # attention asks in each pass
def _rename_dim(spec: Spec, old: str, new: str) -> Spec:
    """Return the type of an activation with its dim `old` called `new`."""
    sizes = tuple((new if d == old else d, n) for d, n in spec.sizes)
    return replace(spec, dims=tuple(new if d == old else d for d in spec.dims), sizes=sizes)


# role of a parameter that no gradient updates -> kind of training state that it is (`KIND.NAME` in a checkpoint)
STATES = {"choice": "model", "load": "state", "factor": "model"}


@dataclass(frozen=True)
class Parameter:
    """Declaration of a parameter: its global name, dims and initialisation.

    `role` selects the scheme's layout: `in` contracts d_model, `out` produces it, `vector` is a norm, bias or position
    of d_model. Three more are states, without gradient, whole on every rank of their stage and in the type of master
    copies. A step's load of experts updates two: `choice` is a bias for the choice of experts, `load` their load in the
    step before, 1 where it is even. `factor` is a number that nothing updates. `init` is zeros, ones, normal or uniform
    (with `std`). `decay`: weight decay applies. `sizes` and `place` as in Spec. `turned`: its initial values are drawn
    with its last dim first.
    """

    name: str
    dims: tuple[str, ...]
    role: str
    init: str = "normal"
    std: float = 0.0
    decay: bool = False
    sizes: tuple[tuple[str, int], ...] = ()
    turned: bool = False
    place: BranchPlace | None = None

    @property
    def num_stack_dims(self) -> int:
        """Return how many first dims number matrices, or vectors, of which each is one to an optimizer: experts. A
        router's are the outputs of one matrix."""
        return int(self.dims[:1] == ("experts",) and self.role != "vector")

    @property
    def num_row_dims(self) -> int:
        """Return how many dims come before the columns of a matrix: its rows, and what numbers matrices."""
        in_last = RANK in self.dims[-1:] or (self.role == "in" and RANK not in self.dims)
        return len(self.dims) - 1 if in_last else self.num_stack_dims + 1

    def shape_as_matrices(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return (number, rows, columns) of the matrices in a block of `shape`: outputs are rows, inputs columns."""
        stack, row = self.num_stack_dims, self.num_row_dims
        return prod(shape[:stack]), prod(shape[stack:row]), prod(shape[row:])

    @property
    def is_state(self) -> bool:
        """Return True if this parameter has no gradient: the routing of a step updates it, or nothing."""
        return self.role in STATES


RANK = "rank"  # the narrow dim of adapters


@dataclass(frozen=True)
class Adapter:
    """Adapter of a parameter: its matrices `down` and `up`, the `scale` of their product, and the `dropout` of its
    input (`platform.plan.adapters`)."""

    down: Parameter
    up: Parameter
    scale: float
    dropout: float = 0.0


Tensor = Spec | Parameter  # of a plan


def tensor_dtype(tensor: Tensor) -> str:
    """Return the dtype (compute, accumulate) of an activation, or of a parameter as the forward pass reads it."""
    return tensor.dtype if isinstance(tensor, Spec) else "compute"


_KEYS: dict[tuple, object] = {}  # by all of an operation but names: an object is hashed and compared at once


@dataclass(frozen=True)
class Operation:
    """Operation of a model's recorded forward pass. `name` is unique within its kind; `reads` names the data tensors
    that it takes beside its inputs, in one layout; `recomputed`: it runs again in the backward pass; `once`: all but
    its result, which no gradient needs."""

    kind: str
    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Spec, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    reads: tuple[str, ...] = ()
    recomputed: bool = False
    once: bool = False

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Return the model parameters among the operation's inputs, without states."""
        return tuple(t for t in self.inputs if isinstance(t, Parameter) and not t.is_state)

    @cached_property
    def states(self) -> tuple[Parameter, ...]:
        """Return the states among the operation's inputs: parameters without gradient."""
        return tuple(t for t in self.inputs if isinstance(t, Parameter) and t.is_state)

    @cached_property
    def nameless_key(self) -> object:
        """Return a key of all, but names, on which the plan of a recorded operation depends: equal layers share it."""
        inputs = ((t.dims, t.role, t.sizes) if isinstance(t, Parameter) else t for t in self.inputs)
        key = self.kind, tuple(inputs), self.outputs, self.attributes, self.reads, self.once
        return _KEYS.setdefault(key, object())

    def __getitem__(self, attribute: str) -> Any:
        """Return an attribute of the recorded operation by name, such as `scale`. Raises KeyError if unknown."""
        return dict(self.attributes)[attribute]


@dataclass(frozen=True)
class Recompute:
    """Selects the activations that the backward pass computes again instead of keeping: `none`; `selective`, the inside
    of attention, whose memory grows with length^2 and whose work does not (Korthikanti et al. 2022); `full`, everything
    between the inputs of every `every` blocks, which with `offload` are kept in host memory."""

    kind: str = "none"
    every: int = 1
    offload: bool = False


NO_RECOMPUTATION = Recompute()


@dataclass(frozen=True)
class StoredStates:
    """Form of an optimizer's states in memory between updates: its moments as `moments` (fp32: the type of master
    copies; int8: 8 bits, and an fp32 scale for each SCALE_BLOCK elements), of which it keeps `count` per element.
    `masters`: split where fp32 master copies are the bf16 weights that are computed with, and 16 bits more. `offload`:
    what lies in host memory: none, states, or states+masters."""

    moments: str = "fp32"
    count: int = 0
    masters: str = "fp32"
    offload: str = "none"

    @property
    def offloads_states(self) -> bool:
        """Return True if moments and averages lie in host memory."""
        return self.offload != "none"

    @property
    def offloads_masters(self) -> bool:
        """Return True if master copies, or their low halves, lie in host memory."""
        return self.offload == "states+masters"

    @property
    def has_masters_apart(self) -> bool:
        """Return True if an update writes the copies to compute with, beside which the rest of masters is kept."""
        return self.masters == "split" or self.offloads_masters

    def has_scales(self, elements: int) -> bool:
        """Return True if moments of a trained parameter of so many elements are kept in 8 bits with scales."""
        return self.moments == "int8" and elements >= LEAST_SCALED and elements % SCALE_BLOCK == 0

    def count_saved_bytes(self, elements: int, scaled: int, wide: int) -> int:
        """Return the bytes that moments of `elements` take less than as numbers of `wide` bytes; some are `scaled`."""
        saved = {"bf16": elements * (wide - 2), "int8": scaled * (wide - 1) - scaled // SCALE_BLOCK * 4}
        return self.count * saved.get(self.moments, 0)


STAGING_BUFFERS = 2  # through which pieces of states in host memory pass
STAGED = 512  # bytes, at whose multiples tensors begin in such a buffer


def count_buffer_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of a staging buffer for a piece of tensors of so many bytes each."""
    return sum(-(-size // STAGED) * STAGED for size in sizes)


SCALE_BLOCK = 256  # consecutive elements of a flattened parameter with one scale, as in torchao
NF4 = "nf4"  # kind of tensors that are weights in 4 bits
SCALES = "_scale"  # behind the name of a moment in 8 bits: the scales of its blocks
LOW = "low"  # kind of the low halves of masters, where `model` has the high ones
LEAST_SCALED = 4096  # elements of the smallest parameter whose moments have scales, as in torchao and bitsandbytes
WIDE_STATES = StoredStates()

NF4_BLOCK = 64  # consecutive elements of a flattened weight in 4 bits (QLoRA) with one scale, as in bitsandbytes
NF4_BYTES = 4 + NF4_BLOCK // 2  # of such a block: its scale in fp32, and two elements in each byte
NF4_DOUBLE = 256 * NF4_BLOCK  # elements of blocks in a row whose scales are in 8 bits, with one scale of these
# elements that belong together -> their bytes: of NF4_DOUBLE scale and offset of the scales in fp32, these, and codes
NF4_UNITS = {NF4_BLOCK: NF4_BYTES, NF4_DOUBLE: 4 + 4 + 256 + NF4_DOUBLE // 2}
NF4_KINDS = {NF4: NF4_BLOCK, f"{NF4}_double": NF4_DOUBLE}  # kinds of tensors, with these elements
NF4_PIECE = {"cpu": 1 << 16, "cuda": 1 << 23}  # elements that are made numbers at once, on a kind of device
NF4_SCRATCH = 6  # bytes that each of these takes meanwhile: half an index of 4 bytes, and a number in fp32


def scores_spec(query: Spec, key: Spec) -> Spec:
    """Return the activation type [batch heads length memory_length] of scores, by the types of queries and keys."""
    sizes = (*query.sizes, *key.rename_dim("length", "memory_length").sizes)
    return Spec(query.region, ("batch", "heads", "length", "memory_length"), sizes)


def resize_dim(spec: Spec, dim: str, size: int) -> Spec:
    """Return the activation type with another size of a dim, such as the length of all keys in a cache."""
    return replace(spec, sizes=(*(pair for pair in spec.sizes if pair[0] != dim), (dim, size)))


# Pointwise functions by name, and how many activations each takes (platform/plan/operations/pointwise.py).
# gelu_tanh: GELU by its approximation with tanh (Hendrycks, Gimpel 2016).
POINTWISE = {"gelu": 1, "gelu_tanh": 1, "relu": 1, "silu": 1, "tanh": 1, "identity": 1, "absolute": 1, "sigmoid": 1}
POINTWISE |= {"add": 2, "multiply": 2}
POINTWISE |= {"gated_silu": 2, "gated_gelu": 2, "gated_gelu_tanh": 2, "gated_relu": 2}  # function(gate) * x
POINTWISE |= {"gated_clamped": 2}  # GPT-OSS's (OpenAI 2025): gate * sigmoid(1.702 gate) * (x + 1), both within 7

CENTRED = "rmsnorm_centred"  # kind of norm: RMSNorm that multiplies by 1 + its gain
EPS = 1e-5  # what norms add to the variance, unless a model says otherwise


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling of the angles of rotary positions to sequences longer than a model was first trained on. `kind`:

    - linear: positions are divided by `factor` (Chen et al. 2023);
    - llama3 (Grattafiori et al. 2024, section 3.4), yarn (Peng et al. 2023): pairs that turn fewer than `low` times in
      `original_length` tokens are divided by `factor`, pairs that turn more than `high` times are not, and between
      these the share falls evenly: with the turns (llama3), or with the number of the pair (yarn), from and to whole
      numbers if `truncate`. yarn multiplies all queries and keys by `magnitude`;
    - dynamic (emozilla 2023): sequences longer than `original_length` have a larger base;
    - longrope (Ding et al. 2024): pair i is divided by `long[i]` in such sequences, else by `short[i]`; times
      `magnitude` as in yarn;
    - proportional (Gemma 4): as linear, and pairs behind the first `share` of a head do not turn.
    """

    kind: str
    factor: float
    original_length: int = 0
    low: float = 1.0
    high: float = 1.0
    magnitude: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    share: float = 1.0


@dataclass(frozen=True)
class Router:
    """Choice of experts for a token by their scores. `function`, softmax or sigmoid, makes probabilities of them. The
    `chosen` experts with the largest ones, each plus a bias if there is one, compute the token; their weights are
    their probabilities, divided by the sum of these if `normalised`, times `scale`. They are chosen within
    `groups_kept` of the `groups` of consecutive experts (DeepSeek-AI 2024); the score of a group is the sum of its
    `group_best` largest probabilities.

    `balance` times a balance loss, and `z` times the square of the log-sum-exp of its scores, are what a token adds to
    the loss. The balance loss of its sequence is the sum over experts of the share of tokens that chose it times its
    mean probability, times experts / chosen: 1 where both are even. Where a layer remembers the load of the step
    before, it is the sum over experts of that times their probability. After a step the bias of each expert rises by
    `rate` if its load was below the mean, and falls if above (Wang et al. 2024).
    """

    function: str
    chosen: int
    normalised: bool = True
    scale: float = 1.0
    balance: float = 0.0
    z: float = 0.0
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 1
    rate: float = 0.0


CROSS_ENTROPY = "cross_entropy"
LABEL_WEIGHTS = "label_weights"  # data tensor of fp64 numbers: what each label counts
PAIR_LOSSES = ("dpo", "ipo", "simpo", "orpo")  # of pairs of answers, the first by default
REFERRING_LOSSES = ("dpo", "ipo")  # of these, which compare the model with a reference
PAIRED = (
    "paired"  # data tensor: 2 n of labels in the chosen answer of pair n of a sequence, 2 n + 1 in the rejected one
)
REFERENCES = "references"  # of fp64 numbers: over an answer's labels they add up to its reference log-probability
DISTILL = "distill"  # the loss of labels of which a teacher's likeliest classes are known
TEACHER = "teacher"  # data tensor: number of the record of these classes at a label, which a rank's block holds instead
AHEAD = "_ahead_"  # in the names of data tensors that are made of others, of multi-token prediction


def token_tensor(depth: int) -> str:
    """Name the data tensor of the tokens `depth` further on in each token's document, -1 for none."""
    return f"tokens{AHEAD}{depth}"


def label_tensor(depth: int) -> str:
    """Name the data tensor of the labels `depth` further on in each token's document, -1 for none."""
    return f"labels{AHEAD}{depth}"


@dataclass(frozen=True)
class LabelLoss:
    """Loss of labels in training: by name, cross-entropy or what takes its place; `weighted`: the data says what each
    label counts; `paired`: it is one of pairs of answers, a chosen and a rejected one; `classes` of a teacher that the
    data has for each label, 0 without one."""

    name: str = CROSS_ENTROPY
    weighted: bool = False
    paired: bool = False
    classes: int = 0


PLAIN = LabelLoss()


# Kernels of fused attention by name, and which of them computes which attention on which kind of device.
#
# The rules follow scaled_dot_product_attention in torch 2.13 (aten/src/ATen/native/transformers, sdp_utils).
# Statements about GPUs hold for the newest ones: an older GPU may take less, which its worker finds out before the run
# forms.

AUTO, MATH = "auto", "math"
KERNELS = (AUTO, "flash", "cudnn", "efficient", "flash3", "flash4", MATH)
FLASH_PACKAGES = {"flash3": "FA3", "flash4": "FA4"}  # kernels of flash_attn's packages -> torch's name of each
_FLASHES = ("flash", *FLASH_PACKAGES)
PREFERRED = {"cpu": ("flash",), "cuda": ("cudnn", "flash", "efficient")}  # by torch under `auto`, first to last


@dataclass(frozen=True)
class AttentionTraits:
    """All of one fused attention on which depends whether a kernel computes it. `bias`: a learned bias is added to the
    scores; `mask`: padding, what lies before a window or in other documents is hidden; `dropout`: probability with
    which the kernel drops; `grouped`: K and V come with fewer heads than Q; `deterministic`: sums are to be taken in a
    fixed order; `d_value`: the d_kv of V if it is another, else 0; `capped`: a soft cap bends the scores."""

    precision: str
    d_kv: int
    bias: bool = False
    mask: bool = False
    dropout: float = 0.0
    grouped: bool = False
    deterministic: bool = False
    d_value: int = 0
    capped: bool = False

    @property
    def has_wide_dtype(self) -> bool:
        """Return True if a plan computes the attention in a type of more than 16 bits."""
        return self.precision in ("fp32", "fp64")


# (kernels, kind of device, the attention that they refuse there, why)
_REFUSED: tuple[tuple[tuple[str, ...], str, Callable[[AttentionTraits], object], str], ...] = (
    (("cudnn", "efficient", *FLASH_PACKAGES), "cpu", lambda t: True, "does not run"),
    *((KERNELS[1:-1], kind, lambda t: t.capped, "has no cap of scores: model.attention_cap=0") for kind in PREFERRED),
    *(
        (kernels, kind, lambda t: t.dropout, "draws no dropout masks, as model.fused_dropout=true asks for")
        for kernels, kind in ((("flash",), "cpu"), (tuple(FLASH_PACKAGES), "cuda"))
    ),
    (("flash",), "cpu", lambda t: t.bias, "has no gradient for a learned bias, as of model.positions=relative"),
    (("cudnn",), "cuda", lambda t: t.bias, "has no gradient for a learned bias, as of model.positions=relative"),
    (_FLASHES, "cuda", lambda t: t.bias or t.mask, "takes neither a bias nor a mask of padding, window or documents"),
    ((*_FLASHES, "cudnn"), "cuda", lambda t: t.has_wide_dtype, "computes in 16 bits: precision=bf16 or fp16"),
    (("efficient",), "cuda", lambda t: t.precision == "fp64", "does not compute in fp64"),
    *((_FLASHES, kind, lambda t: t.d_value, "takes values as wide as keys: model.d_value=0") for kind in PREFERRED),
    ((*_FLASHES, "cudnn"), "cuda", lambda t: t.d_kv > 256, "takes a d_kv of at most 256"),
    (("cudnn",), "cuda", lambda t: (t.d_kv | t.d_value) % 8, "takes a d_kv that is a multiple of 8"),
    (
        ("efficient",),
        "cuda",
        lambda t: (t.d_kv | t.d_value) % (4 if t.has_wide_dtype else 8),
        "takes a d_kv that is a multiple of 8 (fp32: 4)",
    ),
    (("efficient",), "cuda", lambda t: t.grouped, "takes as many heads of K and V as of Q: model.kv_heads=0"),
    (("cudnn",), "cuda", lambda t: t.dropout * 16 % 1, "drops with multiples of 1/16: model.dropout=0.0625 or 0.125"),
    (("cudnn",), "cuda", lambda t: t.deterministic, "adds gradients in no fixed order: train.deterministic=true"),
)


def reason_against_kernel(kernel: str, device: str, traits: AttentionTraits) -> str:
    """Return why a plan cannot have a kernel compute an attention on a kind of device (cpu, cuda), as a predicate; ""
    if it can, as `auto` and `math` always do."""
    rules = ((refuses, why) for kernels, where, refuses, why in _REFUSED if kernel in kernels and where == device)
    return next((why for refuses, why in rules if refuses(traits)), "")


def resolve_auto_kernel(kernel: str, device: str, traits: AttentionTraits) -> str:
    """Return the kernel that a plan has for an attention on a kind of device: the named one, torch's under `auto`."""
    if kernel != AUTO:
        return kernel
    return next((k for k in PREFERRED[device] if not reason_against_kernel(k, device, traits)), MATH)
