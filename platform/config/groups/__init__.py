"""Groups of keys, a file for each or for a few that belong together: every key with its type, default and bounds.
Rules that relate keys are in `platform.config.rules`.
"""
