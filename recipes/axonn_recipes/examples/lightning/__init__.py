"""Lightning's Trainer with the strategy."""
