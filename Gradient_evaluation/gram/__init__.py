"""The inner products of the scores of a block, and nothing about rewards or files."""

from Gradient_evaluation.gram.layers import DenseGradient, LinearGradient, RowsGradient, register
from Gradient_evaluation.gram.score_gram import Block, ScoreGram

__all__ = ["Block", "DenseGradient", "LinearGradient", "RowsGradient", "ScoreGram", "register"]
