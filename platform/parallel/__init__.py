"""A plan at run time: operations and schedules executed on one rank's blocks.
The only room that launches collectives; it decides none of them.
"""
