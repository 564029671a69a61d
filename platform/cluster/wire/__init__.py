"""Messages between the driver and its workers: connections that prove a token, requests, answers.
Nothing here knows what the messages say.
"""
