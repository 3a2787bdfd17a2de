"""One folder a host: scripts as their users write them, on several ranks of one machine."""
