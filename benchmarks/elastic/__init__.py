"""Benchmarks of recovery beside other elastic systems: the same model, the same kill, on nodes of the testbed."""
