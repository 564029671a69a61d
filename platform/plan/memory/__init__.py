"""Prediction of the memory that a plan needs per worker: passes run on storages that only count bytes, then added up
along a schedule's row. No device is asked.
"""
