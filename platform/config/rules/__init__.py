"""Rules that relate keys, where they have a file of their own; `platform.config.checks` runs all of them."""
