"""Communicators: a rank's collectives and messages along mesh axes, counted, timed and logged. Layouts are unknown
here: callers say which tensor to move over which axes."""
