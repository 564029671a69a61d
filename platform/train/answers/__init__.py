"""Answers of a rank's model: texts continued token by token, through a key-value cache, and texts scored."""
