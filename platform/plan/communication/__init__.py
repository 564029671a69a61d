"""The one rule: from layouts to the conversions and collectives of each operation, their sizes and their legality.
No other file may decide what is communicated.
"""
