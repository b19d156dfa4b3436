"""The demonstration: payments are counted exactly once, although the application is killed on the way.

One process sends payments into an embedded topic. Another one, on Spark, computes the running total of each customer;
it is killed with SIGKILL in the middle, with its JVM and its workers, and started again. At the end every output is
compared with what was sent.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from penstock import Application, Event

PAYMENTS, CUSTOMERS, SECONDS = 1_000_000, 10_000, 20.0
BURST = 1_000
MAX_EVENTS_PER_EPOCH = 50_000
MAX_SECONDS_WITHOUT_PROGRESS = 180
POLL_SECONDS = 0.1


def payments(count: int, customers: int, seed: int = 2024) -> Iterator[Event]:
    """Payments of customers drawn at random, the same for the same seed; each has a number of its own."""
    draw = random.Random(seed)
    for number in range(count):
        customer = f"customer-{draw.randrange(customers):05d}"
        yield Event(customer, {"payment": number, "amount": draw.randrange(1, 100_000)}, timestamp_ms=number)


def running_total(customer: str, payment: dict, total: int) -> tuple[dict, int]:
    """The payment with the total so far, and the new total."""
    total += payment["amount"]
    return {**payment, "total": total}, total


def pipeline(folder: Path) -> Application:
    """payments → total → totals, with everything under one folder."""
    places = folder / "topics", folder / "state", folder / "local"
    app = Application("demo", *places, max_events_per_epoch=MAX_EVENTS_PER_EPOCH)
    app.dataframe(app.topic("payments")).stateful_map("total", running_total, default=0).to_topic(app.topic("totals"))
    return app


@dataclass
class Proof:
    """What was found in the outputs, compared with what was sent."""

    sent: int = 0
    counted: int = 0
    outputs: int = 0
    doubled: int = 0
    missing: int = 0
    exact: int = 0
    wrong: int = 0
    customers: int = 0
    last: dict[str, int] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every payment counted exactly once."""
        complete = self.sent == self.counted == self.outputs == self.exact
        return complete and not (self.doubled or self.missing or self.wrong)


def prove(sent: Iterable[Event], outputs: Iterable[Event], counted: int) -> Proof:
    """Compare outputs with what was sent: each payment once, and each total the sum up to that payment."""
    expected, totals = {}, {}
    for event in sent:
        totals[event.key] = totals.get(event.key, 0) + event.value["amount"]
        expected[event.value["payment"]] = (event.key, totals[event.key])
    proof, seen = Proof(sent=len(expected), counted=counted, customers=len(totals)), set()
    for event in outputs:
        number = event.value["payment"]
        proof.outputs += 1
        proof.doubled += number in seen
        proof.exact += expected.get(number) == (event.key, event.value["total"])
        proof.last[event.key] = event.value["total"]
        seen.add(number)
    proof.missing = len(expected.keys() - seen)
    proof.wrong = sum(proof.last.get(customer) != total for customer, total in totals.items())
    return proof


def run_application(folder: Path) -> None:
    """What the application's process does: run on Spark until it is told to stop, or nobody waits for it any more."""
    app, parent = pipeline(folder), os.getppid()

    def stop_if_alone() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        app.stop()

    threading.Thread(target=stop_if_alone, daemon=True).start()
    app.run()


def run_producer(folder: Path, count: int, customers: int, seconds: float) -> None:
    """What the producer's process does: send a few payments, and when they are counted the rest at a steady pace."""
    app, parent = pipeline(folder), os.getppid()
    with app.topic("payments").producer() as send:
        for number, event in enumerate(payments(count, customers)):
            if number % BURST == 0 and os.getppid() == parent:
                send.flush()
                if number == BURST:
                    began = wait_for_outputs(app)
                if number > BURST:
                    time.sleep(max(0.0, began + seconds * number / count - time.monotonic()))
            send(event.value, key=event.key, timestamp_ms=event.timestamp_ms)


def wait_for_outputs(app: Application) -> float:
    """Wait until the application has counted something; returns when that was."""
    while not app.topic("totals").end():
        time.sleep(POLL_SECONDS)
    return time.monotonic()


def living() -> dict[int, int]:
    """All processes of this machine, each with its parent."""
    if not Path("/proc/self/stat").exists():
        lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        return {int(pid): int(parent) for pid, parent in map(str.split, lines.splitlines())}
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if state != "Z":
            found[int(path.parent.name)] = int(parent)
    return found


def family(pid: int) -> set[int]:
    """A process with all that it started: the driver, its JVM, the workers."""
    members, parents = {pid}, living()
    while more := {child for child, parent in parents.items() if parent in members} - members:
        members |= more
    return members & parents.keys()


@dataclass
class Stage:
    """Who performs, and what the audience sees of it."""

    folder: Path
    console: Console
    began: float = field(default_factory=time.monotonic)
    cast: list[subprocess.Popen[bytes]] = field(default_factory=list)
    known: set[int] = field(default_factory=set)

    def tell(self, sentence: str) -> None:
        """Say what happens, and when."""
        self.console.print(f"[dim]{time.monotonic() - self.began:5.1f} s[/]  {sentence}")

    def start(self, *arguments: object) -> subprocess.Popen[bytes]:
        """Start a process of this program; what it prints goes to a file, its temporary files into the folder."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        command = [sys.executable, __file__, "--folder", str(self.folder), *map(str, arguments)]
        with (self.folder / "printed").open("ab") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.folder / "tmp")},
            )
        self.cast.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> int:
        """Kill a process with all that it started; returns how many there were."""
        members = family(process.pid) if process.poll() is None else set()
        self.known |= members
        for member in members:
            os.kill(member, signal.SIGKILL)
        process.wait()
        return len(members)

    def left_running(self) -> int:
        """How many processes of all that were started still run; those that were told to end get a few seconds."""
        for _ in range(50):
            if not self.known & living().keys():
                return 0
            time.sleep(POLL_SECONDS)
        return len(self.known & living().keys())

    def fail(self, sentence: str) -> SystemExit:
        """The end of a demonstration that cannot go on."""
        printed = (self.folder / "printed").read_text(errors="replace").splitlines()[-20:]
        return SystemExit("\n".join([*printed, sentence]))


@dataclass
class Pace:
    """How many payments were counted while the application ran, and for how long it did."""

    counted: int = 0
    seconds: float = 0.0
    _last: tuple[float, int] | None = None

    def see(self, counted: int) -> None:
        """Take a look at a moment when the application counts."""
        now = time.monotonic()
        if self._last is not None:
            self.seconds += now - self._last[0]
            self.counted += counted - self._last[1]
        self._last = (now, counted)

    def pause(self) -> None:
        """The application does not run."""
        self._last = None


def perform(stage: Stage, count: int, customers: int, seconds: float) -> tuple[int, Pace]:
    """Send, kill, start again, wait until all is counted; returns at which event it was killed, and the pace."""
    app, pace, killed_at = pipeline(stage.folder), Pace(), 0
    sent, totals = app.topic("payments"), app.topic("totals")
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=stage.console, transient=True) as progress:
        bars = [progress.add_task(name, total=count) for name in ("payments sent", "payments counted")]
        stage.tell("the application starts: a driver, its JVM and its workers, on Spark")
        application = stage.start("--role", "application")
        producer = stage.start(
            "--role", "producer", "--payments", count, "--customers", customers, "--seconds", seconds
        )
        moved, done, began_at = time.monotonic(), 0, 0
        while done < count:
            time.sleep(POLL_SECONDS)
            before, done = done, totals.end()
            for bar, value in zip(bars, (sent.end(), done), strict=True):
                progress.update(bar, completed=value)
            if before == began_at < done:
                stage.tell(
                    "it goes on from there" if killed_at else "it counts the first payments; now the rest is sent"
                )
            moved = time.monotonic() if done > before else moved
            if application.poll() is not None or producer.poll():
                raise stage.fail("a process of the demonstration ended too early")
            if time.monotonic() - moved > MAX_SECONDS_WITHOUT_PROGRESS:
                raise stage.fail(f"nothing was counted for {MAX_SECONDS_WITHOUT_PROGRESS} s")
            if done > began_at:
                pace.see(done)
            if not killed_at and done >= count // 2:
                members = stage.kill(application)
                killed_at = began_at = done = totals.end()
                pace.pause()
                stage.tell(f"[red]killed with SIGKILL[/] after {done:,} payments: all {members} processes of it")
                application, moved = stage.start("--role", "application"), time.monotonic()
                stage.tell("started again")
        stage.tell("every payment has its output; the application is told to stop")
        stage.known |= family(application.pid)
        application.terminate()
        if application.wait(MAX_SECONDS_WITHOUT_PROGRESS) or producer.wait(MAX_SECONDS_WITHOUT_PROGRESS):
            raise stage.fail("a process of the demonstration ended with an error")
    return killed_at, pace


def counted(folder: Path) -> int:
    """How many payments the committed epochs have counted, read from storage."""
    runner = pipeline(folder).runner()
    runner.close()
    return runner.coordinator.view.counts.read


def show(console: Console, proof: Proof, killed_at: int, pace: Pace, left_running: int) -> bool:
    """Print the proof as a table; returns whether everything in it is as it should be."""
    rows = [
        ("events sent", f"{proof.sent:,}", True),
        ("events counted", f"{proof.counted:,}", proof.counted == proof.sent),
        ("killed with SIGKILL", f"at event {killed_at:,}", 0 < killed_at <= proof.sent),
        ("customers", f"{proof.customers:,}", True),
        ("totals that are exact", f"{proof.customers - proof.wrong:,} of {proof.customers:,}", not proof.wrong),
        ("outputs that are exact", f"{proof.exact:,} of {proof.outputs:,}", proof.exact == proof.outputs == proof.sent),
        ("outputs missing, there twice", f"{proof.missing:,}, {proof.doubled:,}", not (proof.missing or proof.doubled)),
        ("processes left running", f"{left_running:,}", not left_running),
        ("events/s while running", f"{pace.counted / max(pace.seconds, 0.001):,.0f}", True),
    ]
    table = Table(show_header=False, border_style="dim")
    for name, found, right in rows:
        table.add_row(name, f"[bold]{found}[/]", "[green]✓[/]" if right else "[red]✗[/]")
    console.print(table)
    wrong = [name for name, _, right in rows if not right]
    if proof.holds and not wrong:
        console.print("[green]Every payment counted exactly once.[/]")
        return True
    console.print(f"[red]This is wrong: {', '.join(wrong) or 'the proof does not hold'}.[/]")
    return False


def demonstrate(folder: Path, count: int, customers: int, seconds: float) -> bool:
    """The whole demonstration in a folder; returns whether it shows what it should."""
    stage = Stage(folder, Console(highlight=False))
    stage.console.print(f"[bold]{count:,} payments of {customers:,} customers[/], a running total for each")
    try:
        killed_at, pace = perform(stage, count, customers, seconds)
    finally:
        for process in stage.cast:
            stage.kill(process)
    with stage.console.status("comparing every output with what was sent"):
        proof = prove(payments(count, customers), pipeline(folder).topic("totals").read(), counted(folder))
        left = stage.left_running()
    return show(stage.console, proof, killed_at, pace, left)


def main() -> int:
    """Perform the demonstration in a temporary folder, and leave nothing behind."""
    parser = argparse.ArgumentParser(description="Count payments exactly once, although the application is killed.")
    parser.add_argument("--payments", type=int, default=PAYMENTS)
    parser.add_argument("--customers", type=int, default=CUSTOMERS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long sending takes")
    parser.add_argument("--role", choices=["application", "producer"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    size = given.payments, given.customers, given.seconds
    if given.role == "application":
        run_application(given.folder)
        return 0
    if given.role == "producer":
        run_producer(given.folder, *size)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    try:
        return 0 if demonstrate(folder, *size) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    raise SystemExit(main())
