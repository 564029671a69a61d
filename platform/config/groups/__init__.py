"""Groups of keys, a file for each or for a few that belong together: every key with its type, default and bounds.
What relates keys is in `platform.config.rules`.
"""
