"""What every crew is: members and seats, calls on all ranks, how failures are told apart and named.
Nothing here starts a process.
"""
