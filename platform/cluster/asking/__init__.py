"""Trained model that the driver asks: which it is, prompts and texts as token ids, what workers say of them, and what
that means: text, losses, scores of tasks."""
