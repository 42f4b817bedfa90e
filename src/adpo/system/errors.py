"""Errors that commands end with, beside bad input (`ValueError`)."""

from __future__ import annotations


class NothingLearnedError(Exception):
    """Training ended, and no weight is another than at its start; the message says why, and what to change."""
