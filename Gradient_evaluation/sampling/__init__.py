"""One sampling law, both ways: continuations drawn from it (generate.py), and their log-probs (log_probs.py)."""
