"""Kinds of sources: how the files of each are found and checked, and how its documents become tokens."""
