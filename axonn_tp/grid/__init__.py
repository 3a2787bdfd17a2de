"""Who sits where, and which part of a tensor lies there."""
