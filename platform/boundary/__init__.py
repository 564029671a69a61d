"""The border of the process: what comes in from others is read within bounds and held against a typed schema, what goes
out is redacted and escaped. Nothing here knows what a run is.
"""
