"""Layers computed chunk by chunk of rows, whose largest tensors are never whole: the loss over vocab, hidden rows."""
