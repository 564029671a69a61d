"""Groups of keys that have files of their own, and what a group means where that takes more than its keys."""
