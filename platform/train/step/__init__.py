"""Training step: weights, inputs, forward and backward passes, the update, its report and the state to be saved.
No code here handles failures; it can only inject them.
"""
