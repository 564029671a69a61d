"""The driver's side of checkpoints: when the run saves, and which checkpoint is its newest.
Blocks and files are the business of `platform.checkpoint`.
"""
