"""Training on an emulated cluster whose nodes and links fail, again and again."""
