"""Lightning Fabric with the strategy."""
