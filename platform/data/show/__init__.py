"""Listing of what a training step learns from: its sequences, read by the code of the training, for people."""
