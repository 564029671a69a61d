"""Static check of a plan: every tensor is followed through all operations and steps, without running them. It reads a
plan's data alone, and shares no code with the planner."""
