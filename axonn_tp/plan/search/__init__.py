"""Rules found automatically: the model is run on shares, without its weights."""
