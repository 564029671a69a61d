"""Families of models that transformers and we know, as data: what their config.json and the names of their tensors
mean."""
