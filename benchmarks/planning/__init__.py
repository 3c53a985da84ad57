"""`make bench-planning`: quality and speed of the planner."""
