"""Operations that models are written in, one class each: its dims, its layout and collectives, its forward pass and the
bytes that it takes

Its files in reading order: op, registry, recorder, einsums, attention, fused_attention, pointwise, recurrence,
reshaping, lookup, experts, loss_operations.
"""
