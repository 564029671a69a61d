"""The plan is data: which block lives where, who computes what when, and what all of it moves and needs.
Pure Python: no torch, no Ray, no configuration. The command `python -m platform.plan` is here.

Ranks that execute a plan and forecasts that price it take its decisions from here: meshes and layouts, schemes, the
pieces of an attention and of the loss, kernels and compiled functions, types and buckets of tensors, the order of
gathers, activations kept in host memory, schedules and their simulation, the collectives of a step, the names of its
parts, loans of experts. A check finds the unsound parts of a plan, a summary describes it in short, and mistakes in a
user's model are refused with their file and line.

Its files in reading order: layout, scheme, model_types, adapters, rule, quantisation, operation_plan, planner, plan,
chunks, gathered_tiles, plan_builder, gather_order, generation_passes, plan_data, accelerators, step_collectives,
whole_blocks, async_products, schedule, simulate, generators, gantt, plan_check, operation_forms, plan_summary.
"""
