"""Redistribution from the blocks of one plan to the blocks of another: which rank reads what, and sends it to whom.
Nothing here decides which checkpoint is restored.
"""
