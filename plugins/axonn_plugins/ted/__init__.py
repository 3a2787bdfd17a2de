"""TED on the command line: how much memory an MoE's training takes."""
