"""The ways to start workers: Ray, processes, torchrun, inline; and what runs a worker in its process.
Nothing here decides how many.
"""
