"""What transformers makes of every chat template that trl ships, kept: `templates.json.xz` and `answers.json`."""
