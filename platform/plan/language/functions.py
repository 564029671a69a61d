"""Functions that the operations of a model apply, as data: pointwise ones by name, scalings of rotary angles, the
epsilon of norms, the loss of labels."""

from __future__ import annotations

from dataclasses import dataclass

# Pointwise functions by name, and how many activations each takes (platform/plan/operations/rows/pointwise.py).
# gelu_tanh: GELU by its approximation with tanh (Hendrycks, Gimpel 2016).
POINTWISE = {"gelu": 1, "gelu_tanh": 1, "relu": 1, "silu": 1, "tanh": 1, "identity": 1, "absolute": 1, "sigmoid": 1}
POINTWISE |= {"add": 2, "multiply": 2}
POINTWISE |= {"gated_silu": 2, "gated_gelu": 2, "gated_gelu_tanh": 2, "gated_relu": 2}  # function(gate) * x
POINTWISE |= {"gated_clamped": 2}  # GPT-OSS's (OpenAI 2025): gate * sigmoid(1.702 gate) * (x + 1), both within 7

EPS = 1e-5  # what norms add to the variance, unless a model says otherwise


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling of the angles of rotary positions to sequences longer than a model was first trained on. `kind`:

    - linear: positions are divided by `factor` (Chen et al. 2023);
    - llama3 (Grattafiori et al. 2024, section 3.4), yarn (Peng et al. 2023): pairs that turn fewer than `low` times in
      `original_length` tokens are divided by `factor`, pairs that turn more than `high` times are not, and between
      these the share falls evenly: with the turns (llama3), or with the number of the pair (yarn), from and to whole
      numbers if `truncate`. yarn multiplies all queries and keys by `magnitude`.
    """

    kind: str
    factor: float
    original_length: int = 0
    low: float = 1.0
    high: float = 1.0
    magnitude: float = 1.0
    truncate: bool = True


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


@dataclass(frozen=True)
class LabelLoss:
    """Loss of labels in training: by name, cross-entropy or what takes its place; `weighted`: the data says what each
    label counts."""

    name: str = CROSS_ENTROPY
    weighted: bool = False


PLAIN = LabelLoss()
