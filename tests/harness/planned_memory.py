"""Predicted memory of a worker of every stage, of a part of what a run does."""

from __future__ import annotations

from collections.abc import Sequence

from platform.config.fields import Config
from platform.plan.plan import Plan
from platform.predict.footprint import Footprint
from platform.predict.memory_budget import TrainingForecast, _predict_stage_while_scoring


def predict_training(config: Config, plan: Plan) -> list[Footprint]:
    """Predict the memory of one worker of every pipeline stage in a training step of a plan, in stage order."""
    forecast = TrainingForecast(config, plan)
    return [forecast.predict_stage(stage) for stage in range(plan.num_stages)]


def predict_answering(config: Config, plan: Plan, training: Sequence[Footprint]) -> list[Footprint]:
    """Return the predicted memory of one worker of every stage while tasks score the run's model (eval.tasks)."""
    return [
        _predict_stage_while_scoring(config, plan, stage, stage_footprint)
        for stage, stage_footprint in enumerate(training)
    ]
