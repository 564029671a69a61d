"""The culprit of a run that ended, stalls or is slow: who, in what, since when, seen from whom, and why: a pure
function of a run's own records. Evidence is put into words here: activities, waits, ranks, errors.

Its files in reading order: evidence, ended_runs, live_runs.
"""

from platform.monitor.verdict.evidence import Evidence as Evidence
from platform.monitor.verdict.evidence import Verdict as Verdict
from platform.monitor.verdict.live_runs import judge_run as judge_run
