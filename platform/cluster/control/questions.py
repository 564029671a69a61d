"""Questions to another model before a run's mesh forms: which samples the run is going to read, in which order, and the
mesh of the model that is asked about them, a teacher or the first weights of the run."""

from __future__ import annotations

from dataclasses import replace

from platform.cluster.control.run_context import RunContext
from platform.cluster.crew.crew import ByRank, Crew, Worker
from platform.config.fields import Config
from platform.config.groups import Eval, Optimizer
from platform.config.ramps import count_earlier_samples
from platform.data.corpus import TRAIN, Corpus
from platform.plan.plan import Plan
from platform.plan.plan_data import plan_digest
from platform.plan.simulate import stage_rows
from platform.predict.choose_schedule import build_schedule


def count_validation_samples(config: Config, corpus: Corpus) -> dict[str, int]:
    """Return how many samples of each held-out split of a corpus an evaluation of a run reads."""
    most = config.eval.batches * config.train.global_batch
    return {split: min(most, corpus.count_samples(split)) for split, _ in corpus.validation_splits.values()}


def list_read_ranges(run: RunContext, step: int) -> list[tuple[str, int, int]]:
    """Return what a run reads after training step `step`, in this order: (split, first sample, end)."""
    train, every = run.config.train, run.config.eval.every
    held = count_validation_samples(run.config, run.corpus).items() if every else ()
    first, end = (count_earlier_samples(train, number + 1) for number in (step, max(step, run.steps)))
    evaluated = count_earlier_samples(train, min(run.steps, step + every - step % every) + 1) if held else first
    return [(TRAIN, first, evaluated), *((split, 0, count) for split, count in held), (TRAIN, evaluated, end)]


def leave_out_training(config: Config) -> Config:
    """Return the configuration of a model that is asked, and does not learn."""
    return replace(
        config,
        optimizer=Optimizer(kind="sgd", momentum=0.0),
        eval=Eval(),
        elastic=replace(config.elastic, snapshot_every=0),
        monitor=replace(config.monitor, sample=1, layers=0),  # it needs the groups for questions
    )


def seat_model(crew: Crew, config: Config, plan: Plan, number: int, entry: str, fresh: bool = False) -> None:
    """Let workers form the mesh of a model to ask, by its `plan`, ahead of generation `number` of their run. `entry`:
    folder of the run's tokens; `fresh`: the weights get initial values."""
    size, schedule = plan.mesh.world_size, build_schedule(config, plan.num_replicas)
    seating = size, config, crew.store, -number, list(schedule.placement), plan_digest(plan)
    crew.call_ranks(Worker.join_mesh, ByRank(range(size)), *seating)
    rows = [stage.encode_rows() for stage in stage_rows([schedule])]
    of_ranks = ByRank(rows[plan.mesh.rank_coordinates(rank)["stage"]] for rank in range(size))
    crew.call_ranks(Worker.build_trainer, of_ranks, None, entry, None, fresh)
