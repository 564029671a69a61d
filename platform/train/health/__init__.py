"""Health of workers: what the doctor measures on each, alone and with a partner, and what of that makes one bad.
Nothing here decides who gets a seat.
"""
