"""Tensors between layouts at run time: conversions, gradients reduced into shards, tensors kept in one part per rank.
The steps of each are read from the plan; none is chosen here."""
