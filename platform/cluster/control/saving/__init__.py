"""When the run is saved, and what its newest checkpoint is, as the driver sees it.
Blocks and files are `platform.checkpoint`'s.
"""
