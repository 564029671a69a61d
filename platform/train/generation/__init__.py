"""Generation on a rank: texts continued token by token, through a key-value cache, and texts scored."""
