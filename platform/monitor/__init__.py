"""Monitoring of a run, on the driver only: console, journal, metrics, goodput, story, timeline, Weights & Biases.
Nothing here changes what a run does.
"""

from platform.monitor.goodput import cost_line as cost_line
from platform.monitor.goodput import goodput as goodput
from platform.monitor.monitor import RunMonitor as RunMonitor
from platform.monitor.monitor import open_monitor as open_monitor
from platform.monitor.records.journal import Journal as Journal
from platform.monitor.records.json_lines import JsonLines as JsonLines
from platform.monitor.records.metrics import MetricsLog as MetricsLog
from platform.monitor.records.metrics import MetricsRow as MetricsRow
from platform.monitor.story import story as story
from platform.monitor.timeline import Timeline as Timeline
