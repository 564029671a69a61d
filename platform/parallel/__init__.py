"""A plan at run time: communicators, conversions, and every operation on one rank's blocks."""

import torch

# MKL finds out the processor at the first call of its vector math, and publishes an intermediate answer: a thread that
# reads it then, on processors with AVX-512, takes the kernel of the lowest accuracy (an error of 5e-13 in a logarithm,
# 7e-9 in a cosine). One call before there are threads settles it.
torch.ones(1, dtype=torch.float64).log()
