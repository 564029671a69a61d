"""Activations kept for the backward pass: their inputs instead, in parts or in host memory, which is page-locked."""
