"""One sampling law, both ways: continuations drawn from it, and their log-probs."""
