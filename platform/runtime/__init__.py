"""Execution of a plan on one rank: model operations and pipeline schedules run on the rank's blocks. The collectives
are implemented and counted here; which of them a step launches is decided by the plan, never here.

The means of a rank's process are here as well: process groups, random numbers and initial values, page-locked host
memory, the clock of sections, and the progress that heartbeats show: its call, its threads, its connections.

Its files in reading order: communicator, process_groups, host_memory, progress, clock, turns, conversion, flat_buffers,
normal_floats, residency, matrices, kernels, einsum, products, eight_bits, scaled_einsums, tiled_gathers, statistics,
positions, residual, teacher_loss, chunked_loss, expert_rows, delta_chunks, panels, attention_pairs, parallel_ops,
pipeline, recompute, pinned_memory, staged_memory, traced_collectives, compilation, compiled_blocks.
"""
