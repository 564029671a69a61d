"""Rules that refuse the keys of groups train, loss_scale and eval."""

from __future__ import annotations

from collections.abc import Iterator

from platform.boundary.refusals import closest, violation
from platform.config.fields import Config
from platform.config.key import refused
from platform.plan.language.numbers import divisors


def _ramp(config: Config) -> Iterator[str]:
    """Yield a refusal line for each mistake in the configuration of a growing batch (`platform.config.batch_ramp`)."""
    t = config.train
    if not t.ramp_from:
        if t.ramp_samples:
            yield violation("train.ramp_samples", t.ramp_samples, "train.ramp_from=0: the batch does not grow", [0])
        return
    if t.ramp_from >= t.global_batch:
        constraint = f"must be < train.global_batch={t.global_batch}"
        yield violation("train.ramp_from", t.ramp_from, constraint, [t.global_batch // 2, 0])
    elif (grows := t.global_batch - t.ramp_from) % t.ramp_by:
        constraint = f"must divide train.global_batch - train.ramp_from = {grows}"
        yield violation("train.ramp_by", t.ramp_by, constraint, closest(t.ramp_by, divisors(grows)))
    elif not t.ramp_samples:
        yield violation("train.ramp_samples", 0, "train.ramp_from needs the samples over which it grows", [grows])
    if config.pipeline.kind == "file":
        yield violation("train.ramp_from", t.ramp_from, "a schedule from a file has one number of microbatches", [0])


def _start(config: Config) -> Iterator[str]:
    """Yield a refusal line if averaged weights of no saved model are configured to begin with (train.init_averaged)."""
    if config.train.init_averaged and config.train.init in ("", "random"):
        yield violation("train.init_averaged", True, "train.init names no run whose averages could be taken", [False])


def _evaluation(config: Config) -> Iterator[str]:
    """Yield a refusal line for each configured key of evaluations that never take place, or averages not kept."""
    e = config.eval
    if config.checkpoint.best and not e.every:
        yield violation("checkpoint.best", True, "eval.every=0: there are no evaluations", [False])
    if e.patience and not e.every:
        yield violation("eval.patience", e.patience, "eval.every=0: there are no evaluations", [0])
    if e.prompts and not e.every:
        yield violation("eval.prompts", e.prompts[0], "eval.every=0: there are no evaluations", [[]])
    elif e.prompts and config.model.kind in ("encoder", "two_layer"):
        yield violation("eval.prompts", e.prompts[0], f"model.kind={config.model.kind} generates no text", [[]])
    if e.tasks and not e.every:
        yield violation("eval.tasks", e.tasks[0], "eval.every=0: there are no evaluations", [[]])
    elif e.tasks and config.model.kind in ("encoder", "two_layer"):
        yield violation("eval.tasks", e.tasks[0], f"model.kind={config.model.kind} answers no texts", [[]])
    for name, value, none in (("task_folder", e.task_folder, ""), ("task_samples", e.task_samples, 0)):
        if value and not e.tasks:
            yield violation(f"eval.{name}", value, "only eval.tasks reads it", [none])
    if e.least_gain and not e.patience:
        yield violation("eval.least_gain", e.least_gain, "only eval.patience reads it", [0])
    if e.averaged and not config.train.ema:
        yield violation("eval.averaged", True, "train.ema=0: no averages are kept", [False])


def _stop_at(config: Config) -> Iterator[str]:
    """Yield a refusal line if the run is to stop (train.stop_at) after its last step."""
    steps = config.train.steps
    if config.train.stop_at > steps:
        yield refused(config, "train.stop_at", f"must be <= train.steps={steps}", [steps])


def _verify_every(config: Config) -> Iterator[str]:
    """Yield a refusal line if replicas are to be compared (train.verify_every) where there are none."""
    if config.train.verify_every and config.parallel.zero == 3:
        constraint = "parallel.zero=3 keeps each weight once: there are no replicas to compare"
        yield refused(config, "train.verify_every", constraint, [0])


def _loss_scale(config: Config) -> Iterator[str]:
    """Yield a refusal line if the fp16 loss scale begins below its least value."""
    if config.loss_scale.least > config.loss_scale.initial:
        constraint = f"must be <= loss_scale.initial={config.loss_scale.initial:g}"
        yield refused(config, "loss_scale.least", constraint, [config.loss_scale.initial])


def _offload(config: Config) -> Iterator[str]:
    """Yield a refusal line if inputs of blocks are to be kept in host memory, but other activations are kept."""
    if config.recompute_offload and config.recompute != "full":
        constraint = f"recompute={config.recompute} keeps more than the inputs of blocks, recompute=full these alone"
        yield refused(config, "recompute_offload", constraint, [False])


RULES = (_offload, _ramp, _start, _evaluation, _stop_at, _verify_every, _loss_scale)
