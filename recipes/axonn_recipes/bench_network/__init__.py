"""A machine file for the planner, measured."""
