"""A run that goes on with the ranks that are left."""
