"""Blocks in, numbers out. NumPy only."""
