"""Planning from a configuration: choosing the schedule, building the plan, re-planning for another number of workers,
finding changes that fit the memory. No process is started and no tensor is made; a plan's own language and arithmetic
are in plan/.

A run is also predicted from its plan: the work of a step and its price in seconds on a calibrated hardware, the memory
of a worker, traffic by tier of the cluster, and the prices of snapshots, checkpoints and failures. The long explanation
of a plan shows all of it, and tables of measured runs are compared with it.

Its files in reading order: hardware, systems, work, price, bucket_size, calibration, meter, footprint, recorded_passes,
memory_budget, async_choice, pair_choice, choose_schedule, legal_hints, make_plan, replan, step_price, recovery_price,
contenders, sketch, estimate, contender_grid, search, remedies, plan_report, plan_screen, tier_traffic, measured_runs,
sweep_prices, layout_search.
"""
