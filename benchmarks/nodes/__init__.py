"""Benchmarks on the testbed: nodes as namespaces whose links have a limited rate."""
