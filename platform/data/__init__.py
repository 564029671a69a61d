"""Data pipeline: text -> tokens -> one global order of samples, independent of world size. Imports neither torch nor
Ray; which rank gets which part of a sample is not known here."""
