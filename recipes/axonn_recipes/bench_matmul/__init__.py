"""Matrix products by shape and type, for the planner's machine file."""
