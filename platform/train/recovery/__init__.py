"""Recovery of a worker's state: proof of a sound environment, the newest whole state in memory, replicas compared.
The driver decides when each is used.
"""
