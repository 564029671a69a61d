"""Data pipeline: text -> tokens -> one global order of samples, independent of world size. Imports neither torch nor
Ray."""
