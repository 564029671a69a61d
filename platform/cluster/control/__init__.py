"""Control loop of a run: steps, loss spikes, slow workers, failures.
The subpackage `forming` forms a generation; `saving` makes and restores checkpoints.

Its files in reading order: controller, evaluations, former, recruiter, examination, checkpoints, profiles,
run_context, pulse.
"""
