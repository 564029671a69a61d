"""Checkpoints on a storage: sealed manifests, files of blocks, the lease of one driver, the catalogue, the saver.
Nothing here knows a plan.
"""
