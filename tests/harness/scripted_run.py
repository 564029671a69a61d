"""What a run wrote that was driven with a scripted crew: journal and metrics, in short."""

import json
from pathlib import Path

from platform.cluster.shown_commands import Command
from platform.monitor import JsonLines

BOOM = ValueError("boom")


TYPED = Command(["+experiment=x", "a='b c'", "checkpoint.resume=never"])


def events(config, *names):
    """All, or those of these names."""
    journal = JsonLines.read_objects(Path(config.run.dir, "journal.jsonl"))
    return [e for e in journal if not names or e["event"] in names]


def names(config):
    return [event["event"] for event in events(config)]


def seats(config):
    """Of each generation that formed."""
    return [[worker["number"] for worker in event["workers"]] for event in events(config, "formed")]


def steps(config):
    """All that were committed, with the world size, also those that were done again."""
    rows = Path(config.run.dir, "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["world_size"]) for row in map(json.loads, rows)]


def once_each(config):
    return [step for step, _ in steps(config)] == [1, 2, 3, 4, 5, 6]


RUN = ["forming", "formed", "running"]
