"""Rules that refuse the keys of groups train, loss_scale and eval."""

from __future__ import annotations

from collections.abc import Iterator

from platform.boundary.refusals import closest, violation
from platform.config.fields import Config, objective_of
from platform.config.key import refused
from platform.config.ramps.length_ramp import ramp_of
from platform.plan.language.numbers import divisors


def _ramp(config: Config) -> Iterator[str]:
    """Yield a refusal line for each mistake in the configuration of a growing batch (`ramps.batch_ramp`)."""
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


CUT = ("causal", "masked")  # objectives whose samples can be cut: each token has its own place in all data tensors


def _length_ramp(config: Config) -> Iterator[str]:
    """Yield a refusal line for each mistake in the configuration of sequences that grow
    (`ramps.length_ramp`)."""
    key, most, ramp = "train.length_ramp", config.model.length, ramp_of(config.train)
    for number, (entry, (step, length)) in enumerate(zip(config.train.length_ramp, ramp, strict=True)):
        before, after = (ramp[number - 1] if number else None), ramp[number + 1 :]
        if not before and step != 1:
            yield violation(key, entry, "the first length is that of the first steps", [f"0:{length}"])
        if before and step <= before.step:
            constraint = f"must begin after {config.train.length_ramp[number - 1]} does"
            yield violation(key, entry, constraint, [f"{before.step}:{length}"])
        if not length or most % length:
            legal = closest(length, [n for n in divisors(most) if n < most or not after])
            constraint = f"must divide model.length={most}, so that pieces of samples are sequences"
            yield violation(key, entry, constraint, [f"{step - 1}:{n}" for n in legal])
        elif before and length <= before.length:
            legal = closest(length, [n for n in divisors(most) if n > before.length])
            constraint = f"must be longer than the {before.length} tokens before"
            yield violation(key, entry, constraint, [f"{step - 1}:{n}" for n in legal])
        elif not after and length != most:
            constraint = f"the last length must be model.length={most}"
            yield violation(key, entry, constraint, [f"{step - 1}:{most}", f"model.length={length}"])
    if ramp and config.model.kind == "encoder_decoder":
        yield violation(key, config.train.length_ramp[0], "an encoder-decoder has two lengths, which do not grow", [[]])
    elif ramp and (objective := objective_of(config)) not in CUT:
        constraint = f"samples of data.objective={objective} cannot be cut into shorter ones"
        yield violation(key, config.train.length_ramp[0], constraint, [[]])


def _position_rows(config: Config) -> Iterator[str]:
    """Yield a refusal line if a configured table of learned positions has not the rows that sequences need."""
    m, ramp = config.model, bool(config.train.length_ramp)
    learned = m.positions == "learned" and m.kind != "encoder_decoder"
    legal = [m.length] if learned and ramp else [0, m.length] if learned else [0]
    if m.position_rows not in legal:
        constraint = f"the longest sequences have model.length={m.length}" if learned else "there is no such table"
        yield refused(config, "model.position_rows", constraint, legal)


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


RULES = (_offload, _ramp, _length_ramp, _position_rows, _start, _evaluation, _stop_at, _verify_every, _loss_scale)
