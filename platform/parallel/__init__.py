"""Execution of a plan on one rank: model operations and pipeline schedules run on the rank's blocks. The collectives
are implemented and counted here; which of them a step launches is decided by the plan, never here."""
