"""The parts of hosts that all of them need."""
