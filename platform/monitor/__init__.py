"""What a run writes down and shows: metrics, journal, console, Weights & Biases. Used by the driver only."""

from platform.monitor.journal import Journal
from platform.monitor.metrics import METRICS, MetricsLog
from platform.monitor.monitor import Monitor, open_monitor

__all__ = ["METRICS", "Journal", "MetricsLog", "Monitor", "open_monitor"]
