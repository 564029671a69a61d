"""Testbed: nodes on this machine whose links have a limited rate."""
