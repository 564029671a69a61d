"""Control channel between the driver and its workers: TCP connections that authenticate by token, JSON messages, and
the shapes that a message must have. Nothing here executes a call or knows its purpose.
"""
