"""The tokens of one sequence over ranks of z: who has which, attention between them, and models that know nothing of it."""
