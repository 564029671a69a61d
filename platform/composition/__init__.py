"""Composition of a configuration from a command line: Hydra's groups, the user's YAML files, one argument at a time.
The meaning of keys is left to `platform.config`.
"""
