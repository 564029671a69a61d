"""Monitoring of a run, on the driver only: console, journal, metrics, goodput, story, timeline, Prometheus. The records
in journal.jsonl, metrics.jsonl and live.json are declared here. Nothing here changes what a run does.

Its files in reading order: monitor, goodput, step_parts, timeline, events, json_records, journal, metrics.
"""

from platform.monitor.goodput import compute_goodput as compute_goodput
from platform.monitor.goodput import cost_line as cost_line
from platform.monitor.goodput import tell_story as tell_story
from platform.monitor.journal import Journal as Journal
from platform.monitor.json_records import JsonLines as JsonLines
from platform.monitor.metrics import MetricsLog as MetricsLog
from platform.monitor.metrics import MetricsRow as MetricsRow
from platform.monitor.monitor import RunMonitor as RunMonitor
from platform.monitor.monitor import open_monitor as open_monitor
from platform.monitor.timeline import Timeline as Timeline
