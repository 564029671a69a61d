"""Choices that a plan makes from its configuration: the pipeline schedule and the number of microbatches, the kernel of
attention and the pieces of a context's sequences, and the process groups in which a run answers.

`violations_of_kernel` refuses a kernel that cannot compute every attention of a plan. `find_dealing_rounds` counts the
pieces of each sequence that each rank of a context gets. `list_text_requests` are the keys by which a run asks its
model for text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from platform.boundary.refusals import ConfigError, format_violation, refuse_all
from platform.config.extensions import bind_settings_object, register_own_function
from platform.config.fields import Config, Pipeline
from platform.config.layout_rules import legal_context_rounds
from platform.config.ramps import list_batch_sizes
from platform.model import build_model
from platform.plan import generators
from platform.plan.generation_passes import HEAD, generation_groups
from platform.plan.generators import MOST_PASSES, NO_TABLE, SCHEDULES, SHIPPED, Generator, generate, least_microbatches
from platform.plan.layout import LEAST_PIECE, MOST_ROUNDS, format_count
from platform.plan.model_types import AUTO, KERNELS, MATH, reason_against_kernel
from platform.plan.operations.recorder import IllegalPlan
from platform.plan.plan import Plan
from platform.plan.plan_summary import attention_imbalance
from platform.plan.schedule import Schedule, ScheduleError, table
from platform.plan.scheme import ModelMistake
from platform.plan.step_collectives import (
    attention_traits,
    find_fused_attentions,
    process_groups,
    resolve_auto_kernels,
)

MISTAKES_SHOWN = 20  # violations listed for a table from a file


def register_pipeline(name: str, generator: Callable[..., Any], settings: type | None = None) -> None:
    """Register a pipeline schedule that configurations may choose as `pipeline.kind=NAME`: a function (stages, chunks
    per stage, microbatches) -> compute rows, one row of actions per stage.

    The generator refuses numbers that it cannot take by raising `platform.plan.schedule.ScheduleError`; the
    nearest microbatch counts that it does take are then found by trying. `settings`: a dataclass of pipeline.settings,
    which the generator gets as `settings`.
    """
    register_own_function("pipeline.kind", name, settings, generator)
    SCHEDULES[name] = generator


def find_generator(pipeline: Pipeline, in_pairs: bool = False) -> Generator | None:
    """Return the function that generates the pipeline schedule of pipeline.kind; None for `none` and `file`, unless
    passes run `in_pairs`."""
    if in_pairs:
        return generators.build_paired_table
    if pipeline.kind not in SCHEDULES:  # none, or a file
        return None
    return bind_settings_object(SCHEDULES[pipeline.kind], "pipeline.kind", pipeline.kind, pipeline.settings)


def count_microbatches(config: Config, data: int) -> int:
    """Choose the number of microbatches of a run's plan, each spread over `data` replicas, of one global batch: the
    fewest that hold the batch and that the configured pipeline schedule takes. Missing sequences are padding, which
    weighs nothing. (A table in a file fixes its own number; `build_schedule` refuses any other.)

    Raises ConfigError if the schedule's table would be too long to make.
    """
    pipeline, unit = config.pipeline, config.train.microbatch * data
    kind, stages, chunks = pipeline.kind, pipeline.stages, pipeline.chunks
    needed = -(-config.train.global_batch // unit)
    if kind == "file":
        return needed

    def count_forward_passes(stages: int, microbatches: int) -> int:
        """Return the number of forward passes of a pipeline schedule's stages over at least `microbatches`
        microbatches: over as many as the schedule takes at least."""
        least = least_microbatches(kind, stages, chunks, microbatches) if kind in SHIPPED else microbatches
        return stages * chunks * least

    if count_forward_passes(stages, 1) > MOST_PASSES:  # whatever the batch
        least = format_count(count_forward_passes(stages, 1), "pass")
        constraint = f"with pipeline.chunks={chunks}, {least} at least, of which a schedule may have {MOST_PASSES}"
        legal = [n for n in range(1, stages) if count_forward_passes(n, needed) <= MOST_PASSES]
        raise ConfigError("pipeline.stages", stages, constraint, legal[-1:])
    if (passes := count_forward_passes(stages, needed)) > MOST_PASSES:
        constraint = (
            f"is {format_count(needed, 'microbatch')} on pipeline.stages={stages} x pipeline.chunks={chunks}:"
            f" {passes} passes, of which a schedule may have {MOST_PASSES}; more sequences per microbatch make fewer"
        )
        legal = [MOST_PASSES // (stages * chunks) * unit]
        raise ConfigError("train.global_batch", config.train.global_batch, constraint, legal)
    if kind == "none":
        return needed
    return least_microbatches(kind, stages, chunks, needed, find_generator(pipeline))


def build_schedule(config: Config, data: int, in_pairs: bool = False) -> Schedule:
    """Make the pipeline schedule that a configured run over `data` replicas follows: generated as pipeline.kind says,
    or read from pipeline.file. `in_pairs`: True if its passes run in pairs (`Plan.pairs_passes`).

    Without a pipeline it is 1F1B on one stage: each microbatch's backward pass right after its forward pass. Raises
    ConfigError with every violation.
    """
    pipeline, batch = config.pipeline, config.train.global_batch
    unit = config.train.microbatch * data  # sequences of one microbatch of all replicas
    microbatches = count_microbatches(config, data)
    if pipeline.kind == "file":
        return _read_schedule_file(config, microbatches, unit)
    kind = "1f1b" if pipeline.kind == "none" else pipeline.kind
    generator = find_generator(pipeline, in_pairs)
    try:
        return generate(kind, pipeline.stages, pipeline.chunks, microbatches, generator)
    except ScheduleError as error:
        legal = generators.nearest_legal_microbatches(kind, pipeline.stages, pipeline.chunks, microbatches, generator)
        if not legal:  # no number of microbatches helps
            raise ConfigError([format_violation("pipeline", kind, line) for line in error.violations]) from None
        reason = f"is {format_count(microbatches, 'microbatch')}; {'; '.join(error.violations)}"
        raise ConfigError("train.global_batch", batch, reason, [m * unit for m in legal]) from None


def build_short_schedule(config: Config, data: int, microbatches: int, in_pairs: bool = False) -> Schedule:
    """Make the schedule of a configured run, of fewer `microbatches` where stages and peak memory are as of so many."""
    pipeline = config.pipeline
    if pipeline.kind == "file":
        return build_schedule(config, data)
    kind = "1f1b" if pipeline.kind == "none" else pipeline.kind
    few = generators.representative_microbatches(kind, pipeline.stages, pipeline.chunks, microbatches)
    return generate(kind, pipeline.stages, pipeline.chunks, few, find_generator(pipeline, in_pairs))


def place_chunks(config: Config, data: int) -> tuple[int, ...]:
    """Return the pipeline stage of every chunk of a configured run, or refuse its schedule as `build_schedule` does."""
    pipeline, microbatches = config.pipeline, count_microbatches(config, data)
    stages, chunks = pipeline.stages, pipeline.chunks
    taken = chunks == 1 or (pipeline.kind not in (*generators.ONE_CHUNK, "none") and microbatches >= stages)
    if pipeline.kind in ("none", *SHIPPED) and taken:
        return tuple(chunk % stages for chunk in range(stages * chunks))  # as their generators deal them
    return build_schedule(config, data).placement  # or says what is wrong


def build_schedules(config: Config, data: int, in_pairs: bool = False) -> list[Schedule]:
    """Make the pipeline schedules of a configured run over `data` replicas, by number of microbatches, ascending: one
    for each size of a batch that grows (`config.ramps.batch_ramp`); the last is `build_schedule`'s. Raises ConfigError
    as `build_schedule` does."""
    sizes = list_batch_sizes(config.train)
    configs = (replace(config, train=replace(config.train, global_batch=size)) for size in sizes)
    schedules = [build_schedule(sized_config, data, in_pairs) for sized_config in configs]
    return list({schedule.microbatches: schedule for schedule in schedules}.values())


def _read_schedule_file(config: Config, microbatches: int, unit: int) -> Schedule:
    """Return the pipeline schedule read from the table in pipeline.file. Raises ConfigError with its mistakes, the
    first MISTAKES_SHOWN, or with every number of it that differs from the configuration's. `unit`: sequences of one
    microbatch of all replicas."""
    path = config.pipeline.file
    if not path:
        raise ConfigError("pipeline.file", "", NO_TABLE, ["pipeline.file=FILE"])
    try:
        schedule = generators.read_schedule_csv(path)
    except ScheduleError as error:
        more = len(error.violations) - MISTAKES_SHOWN
        shown = error.violations[:MISTAKES_SHOWN]
        shown += [f"and {format_count(more, 'more mistake')}"] if more > 0 else []
        lines = [format_violation("pipeline.file", path, line) for line in shown]
        raise ConfigError([*lines, *(table(error.rows).splitlines() if error.rows else [])]) from None
    refuse_all(_violations_of_file_sizes(config, schedule, microbatches, unit))
    return schedule


def _violations_of_file_sizes(config: Config, schedule: Schedule, microbatches: int, unit: int) -> Iterator[str]:
    """Yield a line per number (stages, chunks, microbatches) of a pipeline schedule from a file that differs from the
    configuration's. `unit`: sequences of one microbatch of all replicas."""
    p = config.pipeline
    for name, configured, tabulated in (("stages", p.stages, schedule.stages), ("chunks", p.chunks, schedule.chunks)):
        key = f"pipeline.{name}"
        if configured != tabulated:
            yield format_violation(key, configured, f"the table in pipeline.file has {tabulated}", [tabulated])
    if microbatches != schedule.microbatches:
        configured_text = format_count(microbatches, "microbatch")
        reason = f"is {configured_text}; the table in pipeline.file has {schedule.microbatches}"
        yield format_violation("train.global_batch", config.train.global_batch, reason, [schedule.microbatches * unit])


def list_text_requests(config: Config) -> dict[str, tuple[Any, Any]]:
    """Map each key by which a configuration asks its planned model for text to (first request, value for none)."""
    requests: dict[str, tuple[Any, Any]] = {"monitor.sample": (tokens, 0)} if (tokens := config.monitor.sample) else {}
    lists = {"eval.prompts": config.eval.prompts, "eval.tasks": config.eval.tasks}
    return requests | {key: (asked[0], []) for key, asked in lists.items() if asked}


def build_generation_model(config: Config, source: int = 0) -> Any:
    """Build the model of a run as passes of generation run it: with the beginning of each sequence and positions as
    inputs, as if sequences were documents. `source`: tokens that its encoder reads, 0: as configured. Raises
    ConfigError for a model that writes no text from left to right, part by part up to its head."""
    c = config.model
    capacity = c.capacity_factor and float(c.experts)  # a slot for every token of a source
    length = source or c.source_length or c.length
    c = replace(c, within_documents=True, source_length=length, capacity_factor=capacity, predict_ahead=0)
    model = build_model(c)
    if HEAD in getattr(model, "units", ()) and getattr(model, "causal", True):
        return model
    raise ConfigError("model.kind", c.kind, "generates no text", ["decoder", "encoder_decoder"])


def list_process_groups(config: Config, plan: Plan) -> list[tuple[str, ...]]:
    """Return the mesh axes of the groups that a configuration asks of its plan: of steps and, if any, of texts."""
    groups = {*process_groups(plan)}
    if list_text_requests(config):
        groups |= generation_groups(plan, build_generation_model(config))
    return sorted(groups, key=lambda axes: (len(axes), axes))


def violations_of_text_requests(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line for each configuration key that asks text of a model that generates none: a model that reads
    in both directions, or a user's model whose generation cannot be planned."""
    asked = list_text_requests(config)
    try:
        if asked:
            generation_groups(plan, build_generation_model(config))
    except (ConfigError, ModelMistake, IllegalPlan, KeyError) as error:
        why = f"model.kind={config.model.kind} generates no text"
        why += f": {error.reason}" if isinstance(error, ModelMistake) else ""
        for key, (value, nothing) in asked.items():
            yield format_violation(key, value, why, [nothing])


EVEN = 1.02  # times the mean of attention's work, which the busiest rank may have
OF_WINDOW = 16, 128  # rounds at most, and tokens of a piece at least, where they make a window's work even
_WHERE = {"cpu": "on a CPU", "cuda": "on a GPU"}


def violations_of_kernel(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line if train.attention_kernel names a kernel that cannot compute some attention of the plan on
    the workers' devices, or if the plan has no fused attention at all. Where cluster.device is `auto`, only a kernel
    that neither a CPU nor a GPU can run is refused."""
    kernel, key = config.train.attention_kernel, "train.attention_kernel"
    if kernel in (AUTO, MATH):
        return
    rate = config.model.dropout
    deterministic = config.train.deterministic
    traits = dict.fromkeys(attention_traits(plan, o, rate, deterministic) for o in find_fused_attentions(plan))
    if not traits:
        constraint = f"no attention of this plan is computed by one kernel{_dropout_remark(rate)}"
        yield format_violation(key, kernel, constraint, [AUTO, MATH])
        return
    device = config.cluster.device
    kinds = {kind: where for kind, where in _WHERE.items() if device in (kind, "auto")}
    pairs = product(KERNELS, kinds)
    why = {pair: next(filter(None, (reason_against_kernel(*pair, t) for t in traits)), "") for pair in pairs}
    legal = [name for name in KERNELS if not all(why[name, kind] for kind in kinds)]
    if kernel not in legal:
        reasons = (f"{where} it {why[kernel, kind]}" for kind, where in kinds.items())
        yield format_violation(key, kernel, "; ".join(reasons), legal)


def violations_of_selective(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line if recompute=selective saves nothing on the workers' GPUs."""
    if config.recompute == "selective" and config.cluster.device == "cuda" and not saves_scores(config, plan):
        constraint = "saves nothing where one kernel computes attention, which keeps no scores"
        yield format_violation("recompute", "selective", constraint, ["none", "full"])


def saves_scores(config: Config, plan: Plan) -> bool:
    """Return True if recompute=selective saves scores on GPUs, which one kernel of attention does not keep."""
    resolved = resolve_auto_kernels(plan, "cuda", config.model.dropout).operations.values()
    again = [dict(o.operation.attributes) for o in resolved if o.operation.recomputed]
    return not all(attributes.get("kernel", MATH) != MATH or attributes.get("grouped") for attributes in again)


def _dropout_remark(dropout: float) -> str:
    """Return the remark of an attention kernel refused for a plan that model.dropout may be why none fits; or ""."""
    return " (model.dropout draws masks that no kernel draws; model.fused_dropout=true lets it)" if dropout else ""


def find_dealing_rounds(config: Config) -> int:
    """Return in how many rounds a configuration deals pieces to ranks of a context, 0 if parts lie straight."""
    # another plan of the run has fewer pieces where they do not divide lengths
    most_rounds = config.parallel.context_pieces // 2 or 1
    return max((n for n in legal_context_rounds(config) if n <= most_rounds), default=0)


def find_even_rounds(config: Config, plan: Plan) -> int:
    """Return the fewest rounds, of those left open by a configuration, by which attention is equal work for all ranks
    of its plan's contexts; where documents hide keys, which only the data know, the most."""
    planner = plan.planner
    if config.parallel.context_pieces or not planner.scheme.zigzag:
        return planner.scheme.rounds
    documents = any(o.operation["begins"] for o in plan.attention_operations)
    rounds, tokens = (MOST_ROUNDS, LEAST_PIECE) if documents else OF_WINDOW
    most = max(1, min(rounds, config.model.length // (2 * config.parallel.context * tokens)))
    legal, work = [n for n in legal_context_rounds(config) if n <= most], dict[int, float]()
    if documents:
        return legal[-1]
    for n in legal:
        work[n] = attention_imbalance(replace(plan, planner=replace(planner, scheme=replace(planner.scheme, rounds=n))))
        if work[n] <= EVEN:
            return n
    return min(work, key=work.__getitem__)
