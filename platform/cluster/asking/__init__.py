"""Model that the driver asks: from texts as token ids to what the workers say of them; tasks of lm-eval as texts."""
