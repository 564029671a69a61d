"""Monitoring of a run, on the driver only: console, journal, metrics, goodput, story, timeline, Weights & Biases."""

from platform.monitor.goodput import Goodput, goodput
from platform.monitor.monitor import Monitor, open_monitor
from platform.monitor.records.journal import Journal
from platform.monitor.records.metrics import METRICS, MetricsLog
from platform.monitor.story import story
from platform.monitor.timeline import Timeline

__all__ = ["METRICS", "Goodput", "Journal", "MetricsLog", "Monitor", "Timeline", "goodput", "open_monitor", "story"]
