"""Questions of the driver to a trained model: its weights and tokenizer, prompts and texts as token ids, the workers'
answers, and the text, losses and scores of tasks made of these."""
