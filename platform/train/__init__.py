"""What one worker does: `worker.py` answers the driver's calls.
Nothing here starts processes or decides who takes part.
"""
