"""Input and output at the edge of the process: foreign data is read within bounds and checked against a typed schema,
output is redacted and escaped. Refusals are worded here, signals handled, long phases shown on the terminal, and the
user's own code is guarded. Nothing here knows what a run is.

Its files in reading order: confinement, documents, interrupts, local_files, parser_process, redaction, refusals,
schema, sealed_blocks, storage, terminal, world_faults.
"""
