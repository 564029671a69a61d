"""The states of a run: steps one after the other, spikes, slow workers.
What a generation is made of, and what is saved, are the rooms inside.
"""
