"""Static check of a plan: every tensor is followed through all operations and steps, without running them. It reads a
plan's data and the scheme's layouts, and shares no rule with the planner."""
