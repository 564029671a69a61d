"""Measured runs as tables: read, written from runs, and compared with what is predicted."""
