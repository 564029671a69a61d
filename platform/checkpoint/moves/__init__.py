"""From the blocks of one plan to those of another: who passes what to whom, over the network or from storage.
Nothing here decides which checkpoint is taken.
"""
