"""Examples of a reward of your own, one for each signature that --reward takes (docs/rewards.md).

    --reward data/format_reward.py:score            graded, in [-0.5, 1]: the answer, and whether it stands alone
    --reward data/format_reward.py:compute_score    the same with VERL's signature
    --reward data/format_reward.py:brevity          with TRL's signature: 1 for an empty text, 0 from 20 letters on

    python Gradient_evaluation/calculate_oracle_v.py --model data/tiny_model --dataset outputs/demo/problems.jsonl \
        --reward data/format_reward.py:score --n_oracle 64 --out_dir outputs/graded

Copy the one that you need and change it. The file needs nothing of this toolkit; what it imports here is there to be used.
"""

from __future__ import annotations

import re

from Gradient_evaluation.utils import integer_reward


def score(text, ground_truth):
    """1 for the right number and nothing else, 0.5 with other text around it, 0 for a wrong number alone, else -0.5."""
    right = integer_reward(text, ground_truth)
    alone = re.fullmatch(r"-?\d+", text.strip()) is not None
    return right - 0.5 + 0.5 * alone


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """``score`` as VERL calls it; "score" is the reward, and VERL logs what else the dictionary has."""
    return {"score": score(solution_str, ground_truth), "acc": integer_reward(solution_str, ground_truth)}


def brevity(completions, **columns):
    """From 1 for an empty text down to 0 for 20 letters and more, as TRL calls it: all completions of a prompt at once."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [max(0.0, 1 - len(text) / 20) for text in texts]
