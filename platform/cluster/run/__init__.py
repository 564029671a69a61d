"""What a run has before and beside its workers: its directory, its origin, places, devices, commands.
Nothing here talks to a worker.
"""
