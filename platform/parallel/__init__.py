"""A plan at run time: communicators, conversions, and every operation on one rank's blocks."""
