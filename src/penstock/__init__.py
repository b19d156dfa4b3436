"""Stateful stream processing in plain Python: every event counts exactly once, and the state is open."""

from penstock.application import Application
from penstock.columns import Column
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
from penstock.events import Event
from penstock.failures import DeadLetter, Failure
from penstock.logic import Emit, StatefulLogic
from penstock.state.codec import Codec
from penstock.state.collections import ListState, MapState
from penstock.state.handles import State, States
from penstock.state.timers import Timer, Timers
from penstock.stream import Stream
from penstock.topics import Producer, Topic

__version__ = "0.1.0"

__all__ = [
    "Application",
    "Codec",
    "Column",
    "ConflictError",
    "CorruptionError",
    "DeadLetter",
    "Emit",
    "Event",
    "Failure",
    "InvalidError",
    "ListState",
    "LogicError",
    "MapState",
    "MissingError",
    "OutcomeUnknownError",
    "PenstockError",
    "Producer",
    "State",
    "StatefulLogic",
    "States",
    "StorageError",
    "Stream",
    "Timer",
    "Timers",
    "Topic",
]
