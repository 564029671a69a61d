"""Control loop of a run: steps, loss spikes, slow workers, failures.
The subpackage `forming` forms a generation; `saving` makes and restores checkpoints.
"""
