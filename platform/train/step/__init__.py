"""One training step: weights, inputs, forward and backward passes, the update, its report and the state to be saved.
Nothing here knows of failures but those that are injected.
"""
