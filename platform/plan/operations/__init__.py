"""Operations that models are written in, one class each: its dims, its layout and collectives, its forward pass and the
bytes that it takes

A recorder lists the operations of a model, and refuses the ones with tensors that a scheme cannot lay out. On a rank an
operation computes by functions of its own. To be metered it is given stand-ins for tensors, of which a ledger counts
the bytes, and a tape runs its backward pass.

Its files in reading order: op, registry, recorder, einsums, scaled_products, adapted, attention, fused_attention,
pointwise, scaling, recurrence, delta_rule, reshaping, lookup, experts, loss_operations.
"""
