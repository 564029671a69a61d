"""Forming of a generation: its members and plan, the state that it goes on from, and the check of every new member.
No training step is taken here.
"""
