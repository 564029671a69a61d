"""Tokens: streams that samples are cut from, and the cache in which they are kept, tokenised once for all runs."""
