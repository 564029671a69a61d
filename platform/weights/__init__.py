"""Weights of models that transformers saves, in and out: what their config.json and names mean, as data, and their
bytes, block by block.
"""
