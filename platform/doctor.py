"""`python -m platform.doctor +experiment=NAME [key=value ...]` examines the workers that a run would have.

It starts them as the run would, measures each alone and with partners, and compares: products, memory, all-gather,
checkpoint storage, clocks, versions, GPUs. It prints a line per worker, and names bad ones with the reason. Exit
status: 0 all are sound; 1 some are not; 2 the configuration is wrong. `cluster.doctor=quick` measures what forming a
mesh would.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from platform.boundary.local_files import list_missing_directories, remove_empty_directories, remove_files
from platform.boundary.redaction import known_secrets
from platform.boundary.refusals import ConfigError, build_command_line, refuse_failures, run_command
from platform.boundary.terminal import Say, escape_terminal_text, print_line
from platform.cluster.crew import torchrun
from platform.cluster.crew.crew import Crew
from platform.cluster.crew.failures import NoPlaces, WorkerFailed
from platform.cluster.crew.job import Job
from platform.cluster.crew.signals import Stopped, StopSignals
from platform.config.fields import Config
from platform.config.identity import find_checkpoint_url
from platform.launch import compose_config, prepare_plan
from platform.plan.layout import format_count
from platform.plan.plan import Plan

SOUND, BAD = 0, 1  # exit statuses, beside REFUSED
_FOLDER = "doctor"  # in the run directory, with the workers' logs; they stay if a worker fails


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.doctor` (default: this process's own); return its exit status."""
    parser = build_command_line("doctor", __doc__)
    parser.add_argument("overrides", nargs="*", help="as for platform.launch: +experiment=NAME key=value ...")
    parser.add_argument("--config-dir", help="the user's own configuration files")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return run_command(parser, _run_doctor, argv, subject="config")


def _run_doctor(arguments: argparse.Namespace) -> int:
    """Examine, for the doctor's command line, the workers of the run that it describes, and print the report; return
    the exit status."""
    say: Say = lambda line: print_line(line, sys.stderr if arguments.json else None)  # noqa: E731
    try:
        config = compose_config(arguments.overrides, arguments.config_dir)
        plan, mistakes = prepare_plan(config, [])
        if plan is None or mistakes:
            raise ConfigError(mistakes)
        if torchrun.is_follower():
            torchrun.follow_driver(Path(config.run.dir) / _FOLDER)
            return SOUND
        try:
            with StopSignals(), open_worker_folder(config, _FOLDER) as folder:
                report = _examine_workers(config, plan, folder, say)
        finally:
            if torchrun.is_under_torchrun():
                torchrun.release_waiting_workers()
    except WorkerFailed as error:
        print_line(f"doctor: {error}; its log: {error.culprit.log}", sys.stderr)
        return BAD
    except (NoPlaces, Stopped) as error:
        print_line(f"doctor: {error}: nothing was examined", sys.stderr)
        return BAD
    print(json.dumps(report.encode_plain()) if arguments.json else escape_terminal_text(report.render_text()))
    return report.exit_status


@contextmanager
def open_worker_folder(config: Config, name: str) -> Iterator[Path]:
    """Make, for a command such as `platform.doctor`, the folder `name` in the run directory for workers that are
    examined or measured, and remove it afterwards with all that was made for it; only if a worker fails, its log stays.
    Raises ConfigError if the run directory cannot be used."""
    folder, home = Path(config.run.dir) / name, find_checkpoint_url(config)
    missing_homes = [] if "://" in home else list_missing_directories(Path(home))
    created_directories = {*list_missing_directories(folder.parent), *missing_homes}
    with refuse_failures("run.dir", config.run.dir, OSError, why="cannot be used ({.strerror})"):
        folder.mkdir(0o700, parents=True, exist_ok=True)
    keep = False
    try:
        yield folder
    except WorkerFailed:
        keep = True
        raise
    finally:
        if not keep:
            remove_files(folder.parent, [folder.name])
            for path in sorted(created_directories, key=lambda path: -len(path.parts)):
                remove_empty_directories([path])


def _examine_workers(config: Config, plan: Plan, folder: Path, say: Say) -> DoctorReport:
    """Start the workers of a run with its spares, as far as there is room, and examine them; return the report. `say`:
    prints progress to the user. Raises ConfigError, NoPlaces, WorkerFailed."""
    from platform.cluster import resources
    from platform.cluster.control.examination import examine_members
    from platform.cluster.control.recruiter import arrange_seats
    from platform.cluster.control.recruiter import member_paths as places_of
    from platform.cluster.crew.launchers import open_crew
    from platform.cluster.driver import relay_log

    e, size, kind = config.elastic, plan.mesh.world_size, resources.launcher_kind(config.cluster)
    places = resources.await_worker_places(config.cluster, size, say, spares=e.spares, least=e.min_workers)
    coordinates = [plan.mesh.rank_coordinates(rank) for rank in range(size)]
    job = Job(config, coordinates, places.device, folder, secrets=known_secrets())
    say(f"examining {format_count(places.members, 'worker')} ({kind}, {job.device})")
    with relay_log("platform.cluster", say), open_crew(kind, job, places.members - size) as crew:
        paths = places_of(crew.ready_members_by_number)
        seats = arrange_seats(paths, plan.mesh, {}) if len(paths) >= size else []
        numbers = [*seats, *sorted(paths.keys() - set(seats), key=lambda number: (paths[number], number))]
        outcome = examine_members(crew, job, numbers, thorough=config.cluster.doctor != "quick")
        bad = {number: dict(why) for number, why in outcome.bad.items()}
        for number, lines in _find_disagreements(crew, job, numbers).items():
            bad.setdefault(number, {})["environment"] = "; ".join(lines)
        ranks = [rank if rank < size else None for rank in range(len(numbers))]
        members = crew.ready_members_by_number
        rows = [
            Row(number, rank, members[number].node, vars(outcome.findings[number]), bad.get(number, {}))
            for rank, number in zip(ranks, numbers, strict=True)
        ]
        return DoctorReport(rows, dict(outcome.shared))


def _find_disagreements(crew: Crew, job: Job, numbers: Sequence[int]) -> dict[int, list[str]]:
    """Return for the doctor's report in which settings, files or versions workers differ from the driver, by number."""
    from platform.cluster.control import examination

    crew.assign_ranks(replace(job, coordinates=[{"data": i} for i in range(len(numbers))]), numbers)
    lines_by_rank = examination.compare_worker_environments(crew, job.config, job.run_dir)
    crew.release_members()
    return {numbers[rank]: lines for rank, lines in lines_by_rank.items()}


@dataclass(frozen=True)
class Row:
    """Row of the report, on one worker. `rank`: the one that it would have in the run, None for a spare; `findings`:
    the fields of its Findings; `bad`: check -> why."""

    number: int
    rank: int | None
    node: str
    findings: dict[str, dict[str, Any]]
    bad: dict[str, str]

    @property
    def node_name(self) -> str:
        """Return a worker's node in the table of `platform.doctor`: the machine's name, the start of Ray's id of it."""
        name, _, ray = self.node.partition("/")
        return f"{name}/{ray[:8]}" if ray else name


@dataclass(frozen=True)
class DoctorReport:
    """Report of an examination: the rows of all workers, and the checks that are bad on most (`shared`: check ->
    why)."""

    rows: list[Row]
    shared: dict[str, str]

    @property
    def exit_status(self) -> int:
        """Return the exit status of `python -m platform.doctor`: 0 if no worker is bad."""
        return BAD if self.shared or any(row.bad for row in self.rows) else SOUND

    def encode_plain(self) -> dict[str, Any]:
        """Return the report as the plain data that `python -m platform.doctor --json` prints."""
        workers, nodes = [*map(vars, self.rows)], sorted({row.node for row in self.rows if row.bad})
        return {"status": self.exit_status, "bad_nodes": nodes, "workers": workers, "shared": self.shared}

    def render_text(self) -> str:
        """Return the report that `platform.doctor` prints: a table of workers, then the bad checks, what to look at."""
        from platform.train.health import BY_NAME, CHECKS

        checks = [check for check in CHECKS if any(check.name in row.findings["readings"] for row in self.rows)]
        table = [["rank", "worker", "node", *(check.name for check in checks), ""]]
        for row in self.rows:
            readings = row.findings["readings"]
            cells = [check.format_cell(readings.get(check.name)) for check in checks]
            verdict = f"BAD: {', '.join(row.bad)}" if row.bad else "sound"
            rank = "spare" if row.rank is None else str(row.rank)
            table.append([rank, str(row.number), row.node_name, *cells, verdict])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
        attention = {row.findings["facts"]["attention"] for row in self.rows if "attention" in row.findings["facts"]}
        lines += [f"attention runs in kernel {kernel}" for kernel in sorted(attention)]
        for row in self.rows:
            for check, why in row.bad.items():
                remedy = f" (look at: {BY_NAME[check].remedy})" if check in BY_NAME else ""
                lines.append(f"bad: worker {row.number} on {row.node_name}: {check}: {why}{remedy}")
        lines += [f"bad on most workers: {check}: {why}" for check, why in self.shared.items()]
        if self.exit_status == SOUND:
            lines.append(f"{format_count(len(self.rows), 'worker')}, all sound")
        return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
