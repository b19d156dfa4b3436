"""Stateful stream processing in plain Python: every event counts exactly once, and the state is open."""

from penstock.errors import (
    ConflictError,
    CorruptionError,
    InvalidError,
    LogicError,
    MissingError,
    OutcomeUnknownError,
    PenstockError,
    StorageError,
)

__version__ = "0.1.0"

__all__ = [
    "ConflictError",
    "CorruptionError",
    "InvalidError",
    "LogicError",
    "MissingError",
    "OutcomeUnknownError",
    "PenstockError",
    "StorageError",
]
