"""What a person sees while an application runs: one live view on a terminal, else a log line every few seconds.

The view costs nothing that grows with the events: an epoch adds a few numbers, the rest is looked at once a second.
"""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from penstock.clock import Clock
from penstock.epochs.records import Counts, EpochRecord, View
from penstock.runner import Run
from penstock.state.store import NO_EPOCH

log = logging.getLogger(__name__)

LOOK_MS = 1000
REPORT_MS = 5000
REFRESHES_PER_SECOND = 4
MAX_SAMPLES = 6
MAX_WIDTH = 88
COLUMN_WIDTHS = (9, 30, 8, 31)
BAR_WIDTH = 24
STARTING, RUNNING, ENDED, STOPPED, FAILED = "starting Spark", "running", "ended", "stopped", "failed"
OVER = (ENDED, STOPPED, FAILED)
_STYLES = {RUNNING: "green", ENDED: "green", STOPPED: "green", FAILED: "red"}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")

Tasks = Callable[[], tuple[int, int] | None]
"""How many tasks of the epoch under way are done, and how many there are; None if that is not known."""

Lag = Callable[[], int | None]
"""How many events Spark's own sources hold that are not taken in; None if they do not tell."""


@dataclass(frozen=True, slots=True)
class Restore:
    """The first epoch of a run: until it is done, workers may be restoring so many rows in so many partitions.

    Replicas are restored inside the tasks, so what can be told from outside is how many of those are done.
    """

    rows: int
    done: int = 0
    tasks: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run at a moment. `behind` is None while that is not known; counts are those of this run."""

    application: str
    doing: str
    epoch: int = NO_EPOCH
    counts: Counts = field(default_factory=Counts)
    events_per_second: float = 0.0
    behind: int | None = None
    state_rows: int = 0
    state_bytes: int = 0
    restore: Restore | None = None


def readable_bytes(count: int) -> str:
    """A number of bytes for people.

    >>> readable_bytes(999), readable_bytes(1_250_000), readable_bytes(0)
    ('999 B', '1.2 MB', '0 B')
    """
    amount, unit = float(count), 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def state_size(view: View) -> tuple[int, int]:
    """The rows and the bytes of all segments: what restoring everything would read."""
    refs = [ref for parts in view.segments.values() for segments in parts.values() for ref in segments]
    return sum(ref.rows for ref in refs), sum(ref.size_bytes for ref in refs)


def as_line(facts: Facts) -> str:
    """The facts in one line.

    >>> as_line(Facts("totals", "running", 41, Counts(read=1200, skipped=2), 350.4, 90, 7, 2048))
    'totals: epoch 41, 1,200 events, 350 events/s, behind by 90, state 7 rows (2.0 kB), skipped 2, dead-lettered 0'
    """
    counts, epoch = facts.counts, "no epoch yet" if facts.epoch == NO_EPOCH else f"epoch {facts.epoch}"
    behind = "" if facts.behind is None else f"behind by {facts.behind:,}, "
    restoring = f", restoring up to {facts.restore.rows:,} rows" if facts.restore else ""
    return (
        f"{facts.application}: {epoch}, {counts.read:,} events, {facts.events_per_second:,.0f} events/s, {behind}"
        f"state {facts.state_rows:,} rows ({readable_bytes(facts.state_bytes)}), "
        f"skipped {counts.skipped:,}, dead-lettered {counts.dead:,}{restoring}"
    )


def as_panel(facts: Facts, spinner: Spinner | None = None) -> Panel:
    """The facts as a box for a terminal."""
    counts = facts.counts
    behind = "…" if facts.behind is None else f"{facts.behind:,} events"
    epoch = "…" if facts.epoch == NO_EPOCH else f"{facts.epoch:,}"
    size = f"{facts.state_rows:,} rows, {readable_bytes(facts.state_bytes)}"
    lost = f"{counts.skipped:,} skipped, {counts.dead:,} dead-lettered"
    table = Table.grid(padding=(0, 2))
    for width in COLUMN_WIDTHS:
        table.add_column(no_wrap=True, width=width)
    table.add_row(*_pair("events", f"{counts.read:,}"), *_pair("events/s", f"{facts.events_per_second:,.0f}"))
    table.add_row(*_pair("behind by", behind), *_pair("epoch", epoch))
    table.add_row(*_pair("state", size), *_pair("errors", lost, "bold yellow" if counts.skipped or counts.dead else ""))
    return Panel(
        Group(table, *_activity(facts, spinner or Spinner("dots"))),
        title=Text.assemble((facts.application, "bold"), " · ", (facts.doing, _STYLES.get(facts.doing, "yellow"))),
        title_align="left",
        subtitle=None if facts.doing in OVER else Text("Ctrl-C stops after the epoch under way", "dim"),
        subtitle_align="right",
        border_style="dim",
        padding=(0, 1),
        width=MAX_WIDTH,
    )


def _pair(name: str, value: str, style: str = "bold") -> tuple[Text, Text]:
    return Text(name, "dim"), Text(value, style or "bold")


def _activity(facts: Facts, spinner: Spinner) -> Iterator[RenderableType]:
    """A line that moves, while there is something to wait for."""
    row = Table.grid(padding=(0, 1))
    restore = facts.restore
    if restore is not None and facts.doing not in OVER:
        bar = ProgressBar(restore.tasks or None, restore.done, width=BAR_WIDTH, pulse=not restore.done)
        done = f"{restore.done} of {restore.tasks} tasks done" if restore.tasks else ""
        row.add_row(spinner, Text(f"restoring up to {restore.rows:,} rows"), bar, Text(done, "dim"))
        yield row
    elif facts.doing not in (RUNNING, *OVER):
        row.add_row(spinner, Text(facts.doing))
        yield row


@dataclass(slots=True)
class Watch:
    """Follows a run, and says how it goes. Its facts may be read by another thread at any time."""

    facts: Facts
    clock: Clock
    live: bool = False
    _run: Run | None = None
    _tasks: Tasks = lambda: None
    _lag: Lag = lambda: 0
    _began: tuple[int, int] = (0, 0)
    _samples: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    _reported: tuple[int, int] = (0, NO_EPOCH)

    def doing(self, what: str) -> None:
        """Say in a word or two what goes on."""
        self.facts = replace(self.facts, doing=what)

    def follow(self, run: Run, tasks: Tasks, lag: Lag = lambda: 0) -> None:
        """Begin with a run; before its first epoch is done, replicas may have to be restored."""
        self._run, self._tasks, self._lag = run, tasks, lag
        self._began = (self.clock.now_ms(), self.facts.counts.read)
        self._samples.clear()
        self._samples.append(self._began)
        found = self._looked_at(run, *self._began)
        restore = Restore(found.state_rows) if found.state_rows else None
        self.facts = replace(found, doing=RUNNING, epoch=run.coordinator.view.epoch, restore=restore)
        if not self.live:
            log.info("%s", as_line(self.facts))
            self._reported = (self.clock.now_ms(), self.facts.epoch)

    def add(self, record: EpochRecord) -> None:
        """Count an epoch that is done."""
        counts = self.facts.counts + record.counts
        self.facts = replace(self.facts, epoch=record.epoch, counts=counts, restore=None)

    def look(self) -> None:
        """Look how far the run is, at most once a second; log it every few seconds, if nobody watches it live."""
        now_ms = self.clock.now_ms()
        if self._run is None or now_ms - self._samples[-1][0] < LOOK_MS:
            return
        self._samples.append((now_ms, self.facts.counts.read))
        self.facts = self._looked_at(self._run, *self._samples[0])
        reported_ms, epoch = self._reported
        if not self.live and now_ms - reported_ms >= REPORT_MS and self.facts.epoch != epoch:
            log.info("%s", as_line(self.facts))
            self._reported = (now_ms, self.facts.epoch)

    def end(self, how: str) -> None:
        """Say how the run ended; the events/s are now those of the whole of it."""
        if self._run is not None and how != FAILED:
            self.facts = self._looked_at(self._run, *self._began)
        self.facts = replace(self.facts, doing=how, restore=None)
        if not self.live and self._run is not None:
            log.info("%s; %s", as_line(self.facts), how)

    def _looked_at(self, run: Run, since_ms: int, events_before: int) -> Facts:
        rows, size = state_size(run.coordinator.view)
        rate = (self.facts.counts.read - events_before) * 1000 / max(1, self.clock.now_ms() - since_ms)
        elsewhere = self._lag()
        known = None if elsewhere is None else behind(run) + elsewhere
        return replace(self.facts, events_per_second=rate, behind=known, state_rows=rows, state_bytes=size)

    def seen(self, spinner: Spinner) -> Panel:
        """The panel of this moment."""
        facts = self.facts
        if facts.restore is not None and (found := self._tasks()) is not None:
            facts = replace(facts, restore=replace(facts.restore, done=found[0], tasks=found[1]))
        return as_panel(facts, spinner)


def behind(run: Run) -> int:
    """How many events of the topics are not yet read."""
    topics, positions = run.program.topics(), run.positions()
    return sum(max(0, topic.log.end().offset - positions[name].offset) for name, topic in topics.items())


@contextmanager
def watching(application: str, clock: Clock, console: Console | None = None) -> Iterator[Watch]:
    """A watch, shown live if the error stream is a terminal and this is the main thread."""
    console = console or Console(stderr=True)
    main = threading.current_thread() is threading.main_thread()
    watch = Watch(Facts(application, STARTING), clock, live=main and console.is_interactive)
    if not watch.live:
        yield watch
        return
    spinner = Spinner("dots")
    live = Live(
        get_renderable=lambda: watch.seen(spinner),
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
        redirect_stdout=sys.stdout.isatty(),
    )
    with live, _logging_above():
        yield watch


@contextmanager
def _logging_above() -> Iterator[None]:
    """While a live view lasts, log lines of handlers that write to the terminal appear above it."""
    moved: list[tuple[logging.StreamHandler[Any], Any]] = []
    terminals = (sys.__stdout__, sys.__stderr__)
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler and handler.stream in terminals:
            moved.append((handler, handler.stream))
            handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)
