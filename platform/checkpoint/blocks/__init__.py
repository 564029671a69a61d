"""Blocks of global tensors: which ranks hold them, who stores which part, and buffers of their bytes.
Nothing here reads or writes storage.
"""
