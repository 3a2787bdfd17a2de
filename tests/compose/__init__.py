"""Several systems at once, against one process in float64."""
