"""Seconds in words. Apart from the progress lines, so that plots need no torch for it."""

from __future__ import annotations


def time_text(seconds: float) -> str:
    """``"45 s"``, ``"31 min"``, ``"1.6 h"``, ``"2.3 days"``."""
    for size, unit, most in ((1, "s", 90), (60, "min", 90 * 60), (3600, "h", 48 * 3600)):
        if seconds < most:
            return f"{seconds / size:.{1 if unit == 'h' else 0}f} {unit}"
    return f"{seconds / 86400:.1f} days"
