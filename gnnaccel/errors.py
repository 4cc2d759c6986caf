"""Exceptions of our own."""

from __future__ import annotations


class EdgeIndexError(IndexError, ValueError, RuntimeError):
    """An edge names a node that does not exist.

    PyG raises ``IndexError`` for a bad source, and ``ValueError`` or ``RuntimeError``
    (out of its aggregation, or out of ``scatter``) for a bad destination; code that
    catches any of them keeps working.
    """

    @classmethod
    def out_of_range(cls, value: int, size: int, what: str) -> EdgeIndexError:
        """Builds the message for index ``value`` among ``size`` nodes."""
        kind = "a negative index" if value < 0 else "an index that is too large"
        return cls(
            f"Found {kind} among the {what} (got {value}). Please ensure that all "
            f"of them point to valid positions in the interval [0, {size}) and try "
            f"again."
        )
