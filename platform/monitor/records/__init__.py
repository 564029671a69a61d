"""The files in which a run records itself, journal and metrics: one JSON object per line, validated when read back.
Nothing here prints.
"""
