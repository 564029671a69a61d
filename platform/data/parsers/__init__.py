"""Parsers of foreign files, each for a child process (`platform.boundary.confined`). They answer with JSON or raw
bytes, which the process that asked checks."""
