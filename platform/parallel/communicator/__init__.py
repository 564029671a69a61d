"""One rank's groups along mesh axes: collectives and messages, counted, timed and logged.
Nothing here knows layouts.
"""
