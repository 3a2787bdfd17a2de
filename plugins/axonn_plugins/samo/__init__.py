"""SAMO on the command line: how much memory a pruned model's training takes."""
