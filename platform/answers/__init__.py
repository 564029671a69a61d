"""Answers of a trained model, on the driver's side: from a checkpoint and prompts, or texts, to what workers say."""
