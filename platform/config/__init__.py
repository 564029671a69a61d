"""Configuration schema: every key with its type, default and bounds, and the rules that relate keys.
The modules here refuse a wrong configuration, and say which keys a resumed run may change and where it saves; they
make no plan and start nothing.

Its files in reading order: key, groups, fields, arguments, composition, validation, identity, moved_imports,
extensions, ramps, reference, layout_rules, training_rules, run_rules.
"""
