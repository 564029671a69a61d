"""What a job has left behind: its state and lives, and where its logs are, read from its run directory."""
