"""Configuration schema: every key with its type, default and bounds, and the rules that relate keys.
The modules here refuse a wrong configuration; they compose no files, make no plan and start nothing.
"""
