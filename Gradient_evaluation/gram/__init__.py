"""The inner products of the scores of a block, and nothing about rewards or files."""
