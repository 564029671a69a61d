"""Parts shared by all kinds of crew: members and seats, calls on all ranks, hang detection, classes of failure.
Nothing here starts a process.
"""
