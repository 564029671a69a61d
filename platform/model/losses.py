"""Losses by name, in place of cross-entropy: what a label costs, as a function of what the model says of it.

Pure Python without torch, so that refusals are quick; only a loss of one's own is tried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from platform.boundary.refusals import OwnCodeError, format_violation, guard_user_code
from platform.config.extensions import PairSettings, bind_settings_object, register_own_function
from platform.config.fields import (
    WEIGHTED,
    Config,
    DistillSettings,
    distill_settings,
    training_loss_name,
    training_objective_name,
)
from platform.plan.layout import format_count
from platform.plan.model_types import CROSS_ENTROPY, DISTILL, PAIR_LOSSES, REFERRING_LOSSES
from platform.plan.operations.registry import OPERATIONS
from platform.plan.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from platform.runtime.chunked_loss import AnswerSums, PairLoss, TokenLoss
    from platform.runtime.teacher_loss import Distillation

LOSSES: dict[str, Callable[..., Any] | None] = dict.fromkeys((CROSS_ENTROPY, *PAIR_LOSSES, DISTILL))


def _dpo(chosen: AnswerSums, rejected: AnswerSums, settings: PairSettings) -> Tensor:
    """Return the loss of each pair of answers by Rafailov et al. (2023), equation 7."""
    return -_log_sigmoid(settings.beta * (_log_ratio(chosen) - _log_ratio(rejected)))


def _ipo(chosen: AnswerSums, rejected: AnswerSums, settings: PairSettings) -> Tensor:
    """Return the loss of each pair of answers by Azar et al. (2023), equation 17, of means over labels."""
    gap = _log_ratio(chosen) / chosen.labels - _log_ratio(rejected) / rejected.labels
    return (gap - 1 / (2 * settings.beta)) ** 2


def _simpo(chosen: AnswerSums, rejected: AnswerSums, settings: PairSettings) -> Tensor:
    """Return the loss of each pair of answers by Meng et al. (2024), equation 6: no reference, but a wanted margin."""
    return -_log_sigmoid(settings.beta * (_mean_log(chosen) - _mean_log(rejected)) - settings.margin)


def _orpo(chosen: AnswerSums, rejected: AnswerSums, settings: PairSettings) -> Tensor:
    """Return the loss of each pair of answers by Hong et al. (2024), equation 6: mean loss, and weighted odds."""
    logs = _mean_log(chosen), _mean_log(rejected)
    odds = [log - (-log.expm1()).log() for log in logs]
    return -logs[0] - settings.beta * _log_sigmoid(odds[0] - odds[1])


def _log_ratio(answer: AnswerSums) -> Tensor:
    """Return how much more likely each answer is to the model than to the reference of its loss, as a logarithm."""
    return answer.log_probability - answer.reference


def _mean_log(answer: AnswerSums) -> Tensor:
    """Return the mean log-probability that the model gives a label of each answer."""
    return answer.log_probability / answer.labels


def _log_sigmoid(x: Tensor) -> Tensor:
    """Return the logarithm of the sigmoid of a loss's tensor."""
    import torch.nn.functional as F  # late: a refusal is quick without torch

    return F.logsigmoid(x)


def loss_measures(config: Config) -> dict[str, PairLoss | Distillation | int]:
    """Return what a validation measures, by name, beside the loss that a model is trained with. Of pairs of answers:
    the `margin` between the rewards of both, and the `accuracy`, 1 where the chosen answer's reward is larger; of a
    model with a teacher the `divergence` of both; the loss of each depth of multi-token prediction."""
    name = training_loss_name(config)
    if depths := config.model.predict_ahead:
        return {f"loss_ahead_{depth}": depth for depth in range(1, depths + 1)}
    if settings := distill_settings(config):
        return {"distill/divergence": _build_distillation(settings, 0.0, 1.0, measures=True)}
    if name not in PAIR_LOSSES:
        return {}
    log = _log_ratio if name in REFERRING_LOSSES else _mean_log

    def margin(chosen: AnswerSums, rejected: AnswerSums, settings: PairSettings) -> Tensor:
        """Return how much larger the reward of each chosen answer is in the loss."""
        return settings.beta * (log(chosen) - log(rejected))

    def accuracy(chosen: AnswerSums, rejected: AnswerSums, settings: PairSettings) -> Tensor:
        """Return 1 for each pair of answers in the loss whose chosen one has the larger reward."""
        return (log(chosen) > log(rejected)).double()

    measures, values = {"preference/accuracy": accuracy, "preference/margin": margin}, config.train.loss_settings
    return {word: bind_settings_object(f, "train.loss", name, values) for word, f in measures.items()}


_PAIR_LOSSES = dict(zip(PAIR_LOSSES, (_dpo, _ipo, _simpo, _orpo), strict=True))


def register_loss(name: str, loss: Callable[..., Any], settings: type | None = None) -> None:
    """Register a user's loss for models as `train.loss=NAME`. `loss` maps a model's statements about labels
    (`platform.runtime.chunked_loss.Likelihood`: `log_probability` of the label, `log_sum_exp` of the logits,
    `mean_log_probability` over vocab, tensors of one number per label) to the loss of each label, elementwise and
    differentiably. The loss of a step is the mean over its labels. `settings`: a dataclass of train.loss_settings,
    which `loss` gets as `settings`."""
    register_own_function("train.loss", name, settings, loss)
    LOSSES[name] = loss


def _build_distillation(
    settings: DistillSettings, label: float, teacher: float, measures: bool = False
) -> Distillation:
    """Build the loss of labels with these weights of their cross-entropy and of the divergence from a teacher."""
    from platform.runtime.teacher_loss import Distillation

    return Distillation(label, teacher, settings.temperature, settings.direction == "reverse", measures)


def loss_functions(config: Config) -> dict[str, TokenLoss | PairLoss | Distillation | None]:
    """Return loss name -> function for a run's model: cross-entropy (None) and the loss that is configured."""
    name = training_loss_name(config)
    if settings := distill_settings(config):
        weight = settings.weight
        return {CROSS_ENTROPY: None, name: _build_distillation(settings, 1 - weight, weight * settings.temperature**2)}
    loss = LOSSES[name] or _PAIR_LOSSES.get(name)
    return {
        CROSS_ENTROPY: None,
        name: loss and bind_settings_object(loss, "train.loss", name, config.train.loss_settings),
    }


def violations_of_loss(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line if the loss that a model is to be trained with is not registered, is no valid loss function,
    or does not fit the model's output layer in `plan`; and if labels have weights that this layer cannot apply."""
    name, objective = training_loss_name(config), training_objective_name(config)
    key, value = ("train.loss", name) if config.train.loss else ("data.objective", objective)
    is_custom, weighted = name != CROSS_ENTROPY, objective in WEIGHTED
    settings = json.dumps(config.train.loss_settings)
    if name not in LOSSES:
        legal = ["a name that register_loss has"]
        yield format_violation(key, value, f"comes with the loss {name}, which nothing registers", legal)
    elif is_custom and (loss := LOSSES[name]) and (mistake := _mistake_of_loss(loss, name, settings)):
        yield format_violation(key, value, f"the loss {name} {mistake}")
    others = {kind for kind, _ in plan.operations if OPERATIONS[kind].is_loss} - {CROSS_ENTROPY}
    if others and (is_custom or weighted):
        reason = f"model.kind={config.model.kind} ends in {min(others)}, which has neither weights nor another loss"
        yield format_violation(key if is_custom else "data.objective", value if is_custom else objective, reason)


@lru_cache
def _mistake_of_loss(function: Callable[..., Any], name: str, settings: str) -> str:
    """Return the fault of a user's loss for models, in words, "" if none is found. `function`: the loss registered as
    `name`, tried here on a few random labels with its `settings`, given as JSON."""
    import torch

    from platform.runtime.chunked_loss import Likelihood

    loss = bind_settings_object(function, "train.loss", name, json.loads(settings))
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logs = logits.log_softmax(1)

    def try_loss(rows: slice) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Try the loss that a user registered for models on the labels in `rows`: return it by label, and the gradients
        of its sum by the three numbers that the model states about each label."""
        numbers = [x[rows].clone().requires_grad_() for x in (logs[:, 0], logits.logsumexp(1), logs.mean(1))]
        losses = loss(Likelihood(*numbers))
        if not isinstance(losses, torch.Tensor) or losses.shape != numbers[0].shape:
            shape = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(f"{shape} for {format_count(len(numbers[0]), 'label')}, of which each needs one number")
        gradients = torch.autograd.grad(losses.sum(), numbers, allow_unused=True, materialize_grads=True)
        return losses.detach(), list(gradients)

    try:
        with guard_user_code("train.loss"):
            losses, derivatives = try_loss(slice(0, 6))
            parts = [try_loss(rows) for rows in (slice(0, 2), slice(2, 6))]
    except OwnCodeError as error:
        return str(error)
    stacked = torch.stack([losses, *derivatives])
    if not stacked.isfinite().all():
        return "is not finite, or its gradient is not, at ordinary probabilities"
    if not torch.equal(stacked, torch.cat([torch.stack([part, *of_part]) for part, of_part in parts], 1)):
        return "gives a label another value beside other labels, or another time"
    return ""
