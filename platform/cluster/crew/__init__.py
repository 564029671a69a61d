"""Crew: the worker processes of a run behind one interface (`base`), started by any of several launchers
(`launchers`); `open.py` chooses the launcher. Nothing here knows about steps, plans or checkpoints.
"""
