"""Moved to runs/report.py; this name is for Policy_Optimization/train_group_sizes.py, until that imports from there."""

from Gradient_evaluation.runs.report import budget_table

__all__ = ["budget_table"]
