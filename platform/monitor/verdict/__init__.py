"""The culprit of a run that ended, stalls or is slow: who, in what, since when, seen from whom, and why: a pure
function of a run's own records.
"""

from platform.monitor.verdict.evidence import Evidence as Evidence
from platform.monitor.verdict.judge import verdict_on as verdict_on
from platform.monitor.verdict.verdict import Verdict as Verdict
