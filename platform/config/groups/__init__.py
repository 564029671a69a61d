"""Groups of keys that have files of their own."""
