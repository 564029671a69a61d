"""From a configuration to a plan: building it, choosing its schedule, another plan for other workers, one that fits.
No process is started and no tensor is made here.
"""
