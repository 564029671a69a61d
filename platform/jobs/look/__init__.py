"""Traces of a job: its state and lives, and where its logs are, read from its run directory."""
