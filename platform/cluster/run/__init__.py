"""The parts of a run that need no worker: its directory, the checkpoint it resumes from, resources, devices, commands.
Nothing here talks to a worker.
"""
