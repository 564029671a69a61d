"""Snapshots of the last two steps in host memory, copies of them at peers, and recovery from what survivors hold.
Nothing here touches storage.
"""
