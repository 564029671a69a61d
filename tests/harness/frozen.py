"""Imported last by a process that others are forked from: exempts all that it has imported from garbage collection, so
that what is forked neither looks at it nor copies its pages."""

import gc

gc.collect()
gc.freeze()
