"""Planning from a configuration: choosing the schedule, building the plan, re-planning for another number of workers,
finding changes that fit the memory. No process is started and no tensor is made; a plan's own language and arithmetic
are in plan/.

Its files in reading order: hardware, work, price, calibration, meter, footprint, memory_budget, choose_schedule,
legal_hints, make_plan, replan, step_price, recovery_price, contenders, estimate, search, remedies, plan_report,
plan_screen, tier_traffic, measured_runs.
"""
