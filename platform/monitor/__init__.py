"""Monitoring of a run, on the driver only: console, journal, metrics, goodput, story, timeline, Weights & Biases.
Nothing here changes what a run does.
"""

from platform.monitor.goodput import cost_line, goodput
from platform.monitor.monitor import RunMonitor, open_monitor
from platform.monitor.records.journal import Journal
from platform.monitor.records.json_lines import JsonLines
from platform.monitor.records.metrics import MetricsLog, MetricsRow
from platform.monitor.story import story
from platform.monitor.timeline import Timeline

__all__ = [
    "Journal",
    "JsonLines",
    "MetricsLog",
    "MetricsRow",
    "RunMonitor",
    "Timeline",
    "cost_line",
    "goodput",
    "open_monitor",
    "story",
]
