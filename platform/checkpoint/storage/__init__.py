"""Checkpoints on storage: sealed manifests, files of blocks, the driver's lease, the catalogue, the saver.
Nothing here knows about plans.
"""
