"""Fuzzers: each draws a case from a seed, checks it, and says of which class it was.

A fuzzer is a module with

    CLASSES: the names of all classes of cases
    opened() -> context manager that yields `attempt`
    attempt(seed) -> the class of the case that the seed draws; raises AssertionError, naming the case, where it fails

`run` counts the cases of every class. `make test` runs a fixed seed of each for seconds; `python -m tests.fuzz NAME
--count N --seed S` runs as many as asked for.
"""
