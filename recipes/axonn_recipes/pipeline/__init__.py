"""A GPT as a pipeline: the curves of chapter 3."""
