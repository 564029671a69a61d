"""Files on any storage: opened, listed, read, replaced as a whole, and sealed by the hashes of their blocks."""
