"""Keys of group optimizer: update rule, and the schedule of its learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from platform.config.key import key, own_settings


@dataclass
class Optimizer:
    """Update rule, and the schedule of its learning rate."""

    kind: str = key("adamw", "the optimizer", ("adamw", "sgd", "lion", "muon", "adafactor"), open=True)
    lr: float = key(1e-3, "peak learning rate, reached after warm-up", ">= 0 and < inf", most=1e6)
    betas: list[float] = key(
        [0.9, 0.95], "decay rates of Adam's two moments; of Lion's update and its momentum", ">= 0 and < 1"
    )
    momentum: float = key(0.9, "sgd, muon: decay rate of the momentum; 0 = none", ">= 0 and < 1")
    nesterov: bool = key(False, "sgd, muon: Nesterov's momentum, which looks one update ahead")
    matrices: str = key("", 'muon: regular expression of its parameters; "" = weights of hidden layers')
    newton_schulz: int = key(5, "muon: iterations that make a matrix orthogonal", ">= 1", most=99)
    matrix_lr: str = key(
        "match_rms_adamw", "muon: how optimizer.lr is scaled by a matrix's shape", ("match_rms_adamw", "original")
    )
    beta2_decay: float = key(
        -0.8, "adafactor: update t takes t to this power of the new squares into its moments", ">= -10 and <= 0"
    )
    update_clip: float = key(1.0, "adafactor: largest root mean square of an update, before its rate", ">= 1")
    relative_step: bool = key(False, "adafactor: the learning rate is at most 1 / sqrt(update)")
    scale_by_weight: bool = key(True, "adafactor: the rate is times the root mean square of what is updated")
    least_scale: float = key(1e-3, "adafactor: optimizer.scale_by_weight is by this at least", ">= 0", most=1e6)
    groups: list[dict[str, Any]] = key(
        [],
        "factors by parameter: {match: REGULAR EXPRESSION, lr: FACTOR, weight_decay: FACTOR}; the first that matches",
    )
    eps: float = key(
        1e-8, "Adam's epsilon, added to the denominator; adafactor: its least value", "> 0 and < inf", most=1e6
    )
    weight_decay: float = key(
        0.1, "weight decay, decoupled but for sgd; not of vectors (norms, biases)", ">= 0 and < inf", most=1e6
    )
    clip: float = key(1.0, "largest global gradient norm; 0 = no clipping", ">= 0")
    schedule: str = key(
        "cosine",
        "learning rate after warm-up",
        ("constant", "cosine", "cosine_restarts", "inverse_sqrt", "linear", "wsd"),
        open=True,
    )
    warmup_steps: int = key(0, "updates of linear warm-up from 0 to optimizer.lr", ">= 0")
    min_lr: float = key(0.1, "the cosines, linear and wsd end at this fraction of optimizer.lr", ">= 0 and <= 1")
    cycles: int = key(2, "cosine_restarts: falls from optimizer.lr, of equal length", ">= 1", most=10**6)
    decay_steps: int = key(0, "wsd: updates of the last, linear fall; 0 = a tenth of train.steps", ">= 0")
    settings: dict[str, Any] = own_settings("optimizer")
    schedule_settings: dict[str, Any] = own_settings("learning-rate schedule")
