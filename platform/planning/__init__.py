"""Planning from a configuration: choosing the schedule, building the plan, re-planning for another number of workers,
finding changes that fit the memory. No process is started and no tensor is made; a plan's own language and arithmetic
are in plan/."""
