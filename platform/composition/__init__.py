"""How a command line becomes a configuration: Hydra's files and groups, the user's own YAML, one argument at a time.
No key's meaning is known here; that is `platform.config`.
"""
