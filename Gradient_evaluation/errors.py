"""The one exception that a user can cause."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The message is one line: where it is and what to do about it."""
