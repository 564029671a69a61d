"""Rules that relate keys: a file for each file of `platform.config.groups`. `platform.config.checks` runs them all."""
