"""Ramps: how many sequences each training step takes, and how long they are, as functions of the step alone."""
