"""Training inside one worker: `worker.py` answers the driver's calls.
Starting processes and choosing the members of a mesh are left to the driver.
"""
