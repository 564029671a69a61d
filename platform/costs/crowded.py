"""Links between pipeline stages that are busy: how much longer a step takes where messages wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from platform.costs.machine import Hardware
from platform.costs.step_work import StepWork
from platform.plan.language.mesh import Mesh
from platform.plan.schedule.generators import SHIPPED, generate
from platform.plan.schedule.simulate import makespan
from platform.plan.schedule.stage_messages import StageMessages, makespan_with
from platform.plan.schedule.table import Action, Schedule

CROWDED = 0.05  # of a chunk's passes: a way there and back that takes less waits for no other one
ALTERNATING = ("none", "1f1b", "gpipe")  # schedules that a closed form knows with their messages


def is_crowded(work: StepWork, passes: float, messages: float) -> bool:
    """Return True if `messages` of a chunk and microbatch may queue on links beside other `passes` of its stage."""
    at_once = work.execution.schedule not in ALTERNATING and not work.execution.stands_by
    return at_once and messages > CROWDED * passes


def waited(work: StepWork, hardware: Hardware, seconds: Callable[[int, Action], float], message: float) -> float:
    """Return by how much messages, each of `message` seconds alone on its link, make a step longer where they share
    links. Three rounds of all stages are simulated, and more rounds follow from them. `seconds`: a function of (stage,
    action)."""
    messages = StageMessages(lambda source, sink: message, link_of(work.plan.mesh, hardware), early=not hardware.ahead)

    def more(schedule: Schedule) -> float:
        """Return by how much messages make a schedule's step longer."""
        return makespan_with(messages, schedule, seconds) - makespan(schedule, seconds)

    stages, chunks, n = work.plan.stages, len(work.plan.chunks) // work.plan.stages, work.plan.microbatches
    if (kind := work.execution.schedule) not in SHIPPED:
        assert work.execution.table is not None, "a schedule of the user's comes with its table"
        return more(work.execution.table)
    if n <= 3 * stages:
        return more(generate(kind, stages, chunks, n))
    two, three = (more(generate(kind, stages, chunks, rounds * stages)) for rounds in (2, 3))
    return three + (three - two) * (n / stages - 3)


def link_of(mesh: Mesh, hardware: Hardware) -> Callable[[int], Hashable]:
    """Return the function that names the link of a stage: its own adapters', or its node's, whose ranks share fewer."""
    ranks = mesh.size // mesh.axes["stage"]
    if hardware.adapters >= hardware.ranks or ranks >= hardware.ranks:
        return lambda stage: stage
    return lambda stage: stage * ranks // hardware.ranks
