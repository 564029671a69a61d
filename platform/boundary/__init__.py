"""Input and output at the edge of the process: foreign data is read within bounds and checked against a typed schema,
output is redacted and escaped. Nothing here knows what a run is.
"""
