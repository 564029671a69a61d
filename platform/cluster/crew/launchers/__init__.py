"""Launchers, one per way to start workers: Ray, processes, torchrun, inline; and the host that runs a worker in its
process. Nothing here decides how many workers there are.
"""
