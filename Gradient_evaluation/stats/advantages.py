"""Which weight does each continuation of a group get? One function with the definitions that are in use."""

from __future__ import annotations

import numpy as np

VERL_EPSILON, TRL_EPSILON = 1e-6, 1e-4
KINDS = ("leave_one_out", "mean_only", "std_verl", "std_trl", "leave_one_out_over_std", "length_weighted")
PER_LENGTH = ("length", "group_tokens")


def group_advantages(rewards: np.ndarray, kind: str, lengths: np.ndarray | None = None) -> np.ndarray:
    """Advantages of the continuations of a group, same shape as ``rewards``, float64.

    Args:
        rewards: (K,) or (..., K), K >= 2, any finite values.
        kind: ``leave_one_out``: r - mean of the other K - 1 (the paper's GRPO; RLOO);
            ``mean_only``: r - group mean (Dr. GRPO);
            ``std_verl``, ``std_trl``: (r - group mean) / (std_ddof1 + 1e-6), or 1e-4 (VERL, TRL);
            ``leave_one_out_over_std``: leave-one-out over std_ddof1, no epsilon (the paper's appendix);
            ``length_weighted``: r - sum(length r) / sum(length) over all K, its own included (OPO).
            A kind with ``/length`` behind it: over the continuation's own length; with ``/group_tokens``: over the mean
            length of the group.
        lengths: same shape, in tokens; only ``length_weighted`` and the last two read them.

    A group of equal rewards gets zeros. Raises ValueError for an unknown kind, K < 2, a reward that is not
    finite, or missing lengths. The advantage of a right continuation, where 3 of 8 are right:

    >>> rewards = np.array([1, 0, 0, 1, 0, 1, 0, 0])
    >>> {kind: round(float(group_advantages(rewards, kind)[0]), 4) for kind in KINDS[:5]}
    {'leave_one_out': 0.7143, 'mean_only': 0.625, 'std_verl': 1.2076, 'std_trl': 1.2074, 'leave_one_out_over_std': 1.3801}
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    kind, _, per = kind.partition("/")
    if kind not in KINDS or per not in ("", *PER_LENGTH):
        raise ValueError(f"unknown kind of advantage {kind!r}: one of {', '.join(KINDS)}")
    if rewards.ndim == 0 or rewards.shape[-1] < 2:
        raise ValueError(f"a group needs at least 2 continuations, got rewards of shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError("a reward is not finite")
    if per:
        divisor = np.asarray(lengths, dtype=np.float64)
        return group_advantages(rewards, kind, lengths) / (divisor if per == "length" else divisor.mean(-1, keepdims=True))
    size = rewards.shape[-1]
    equal = (rewards == rewards[..., :1]).all(-1, keepdims=True)
    # A rounding error of the mean would become large when it is divided by a std of almost 0.
    centred = np.where(equal, 0.0, rewards - rewards.mean(-1, keepdims=True))
    if kind == "length_weighted":
        if lengths is None:
            raise ValueError("length_weighted advantages need lengths")
        weights = lengths / np.sum(lengths, axis=-1, keepdims=True)
        return centred - (weights * centred).sum(-1, keepdims=True)
    if kind == "mean_only":
        return centred
    if kind == "leave_one_out":
        return centred * size / (size - 1)
    std = rewards.std(-1, ddof=1, keepdims=True)
    if kind in ("std_verl", "std_trl"):
        return centred / (std + (VERL_EPSILON if kind == "std_verl" else TRL_EPSILON))
    return centred * size / (size - 1) / np.where(equal, 1.0, std)
