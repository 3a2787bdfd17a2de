"""Every 4D grid of a cluster, measured, beside what the planner says of it (Figure 5.2, made anywhere)."""
