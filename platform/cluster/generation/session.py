"""Session with the workers of a trained model: a crew that has formed and has its weights, for as long as it is
asked."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from platform.boundary.redaction import known_secrets
from platform.boundary.refusals import ConfigError, refuse_all, violation
from platform.cluster.crew.base.crew import ByRank, Crew
from platform.cluster.crew.base.job import Job
from platform.cluster.crew.open import open_crew
from platform.cluster.run import resources
from platform.config.fields import Config
from platform.plan.core.plan import Plan
from platform.plan.core.plan_data import digest
from platform.plan.schedule.rows import stage_rows
from platform.planning.answering import answering_model
from platform.planning.attention_choice import kernel_violations
from platform.planning.choose_schedule import schedule_of
from platform.weights.initial import initial_weights


@contextmanager
def open_session(
    config: Config, plan: Plan, say: Callable[[str], None], *, corpus: str = "", writes: bool = True
) -> Iterator[Crew]:
    """Open a crew of workers under `plan` that hold the trained weights of train.init, to be asked, and close it after
    the block. `corpus`: the folder of the tokens that they evaluate on; `writes`: they are asked to continue or score
    texts. Raises ConfigError, before any process starts unless only workers can see it; WorkerFailed if one fails."""
    if writes:
        config = replace(config, monitor=replace(config.monitor, sample=1))  # as a run that asks its model
        answering_model(config)
    initial_weights(config)
    places = resources.reserve_workers(config.cluster, plan.mesh.size, say)
    here = replace(config, cluster=replace(config.cluster, device=places.device))
    refuse_all(kernel_violations(here, plan))
    size, schedule = plan.mesh.size, schedule_of(config, plan.replicas)
    coordinates = [plan.mesh.coordinates(rank) for rank in range(size)]
    with tempfile.TemporaryDirectory(prefix="answers-") as logs:
        job = Job(config=config, coordinates=coordinates, device=places.device, run_dir=Path(logs),
                  secrets=known_secrets())  # fmt: skip
        with open_crew(resources.crew_kind(config.cluster), job) as crew:
            crew.seat(job, list(range(size)))
            stage_of = list(schedule.placement)
            crew.call("form", ByRank(range(size)), size, config, crew.store, 1, stage_of, digest(plan))
            rows = [stage.plain() for stage in stage_rows([schedule])]
            crew.call("build", ByRank(rows[c["stage"]] for c in coordinates), None, corpus, None, False)
            if failure := crew.call("begin")[0]:
                raise ConfigError(violation("CHECKPOINT", config.train.init, failure.reason))
            yield crew
