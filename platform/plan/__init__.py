"""The plan is data: which block lives where, who computes what when, and what all of it moves and needs.
Pure Python: no torch, no Ray, no configuration. `python -m platform.plan` explains a plan.

Its files in reading order: layout, scheme, model_types, rule, operation_plan, planner, plan, chunks, plan_builder,
gather_order, generation_passes, plan_data, accelerators, step_collectives, schedule, simulate, generators, gantt,
plan_check, operation_forms, plan_summary.
"""
