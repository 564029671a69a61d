"""What a run writes down: typed lines of the journal and of metrics, read back without trust.
Nothing here prints.
"""
