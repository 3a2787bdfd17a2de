"""What language models of several sizes learn by heart, and the goldfish loss against it: 002, section VIII."""
