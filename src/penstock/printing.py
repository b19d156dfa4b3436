"""Printing what a pipeline sends, for those who want to look."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from penstock.events import Event

MAX_CELL_CHARACTERS = 200


def print_events(epoch: int, partition: int, events: Sequence[Event]) -> None:
    """Print each event on a line: its key and its value."""
    console = Console(highlight=False, soft_wrap=True)
    for event in events:
        console.print(f"{event.key!r}: {event.value!r}", markup=False)


@dataclass(frozen=True, slots=True)
class TablePrinter:
    """Prints the last events of an epoch's partition as a table with a column for each field."""

    size: int

    def __call__(self, epoch: int, partition: int, events: Sequence[Event]) -> None:
        """Print one table."""
        shown = events[-self.size :]
        rows = [event.value if isinstance(event.value, dict) else {"value": event.value} for event in shown]
        columns = list(dict.fromkeys(str(name) for row in rows for name in row))
        table = Table("key", *columns)
        for event, row in zip(shown, rows, strict=True):
            cells = {str(name): value for name, value in row.items()}
            table.add_row(_cell(event.key), *(_cell(cells[name]) if name in cells else "" for name in columns))
        console = Console(highlight=False)
        console.print(f"epoch {epoch}, partition {partition}: {len(events)} events")
        console.print(table)


def _cell(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text[:MAX_CELL_CHARACTERS].replace("[", r"\[")
