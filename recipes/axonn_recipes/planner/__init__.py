"""The figures and tables of 004, and of the dissertation's chapter 5 that come from models."""
