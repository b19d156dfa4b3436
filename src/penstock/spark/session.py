"""The Spark session: settings that make an epoch short and partitions stable, where the user has set none."""

import atexit
import logging
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from penstock.errors import InvalidError
from penstock.spark.java import find_java_home
from penstock.spark.noise import Outlet

TASK_FAILURES = 4
MAX_EXIT_SECONDS = 20
MAX_SOCKET_FOLDER_CHARACTERS = 60
MAX_REASON_CHARACTERS = 300
_CALLED = "An error occurred while calling"
_CLASS = re.compile(r"^(\w+\.)+\w+: ")
_MEANINGS = {
    "No space left on device": "there is no space left on a disk",
    "Python worker exited unexpectedly": "a Python worker died, again and again: killed from outside, or out of memory",
    "OutOfMemoryError": "the Java process is out of memory",
    "All masters are unresponsive": "no Spark master answers there",
}
_LOCAL = re.compile(r"local(\[(\*|\d+)\])?")

SESSION_SETTINGS = {
    "spark.sql.adaptive.enabled": "false",
    # Spark looks at the size of a whole batch again with each row that it adds: long batches cost more for each row.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "2000",
    "spark.sql.streaming.numRecentProgressUpdates": "10",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.shuffle.reduceLocality.enabled": "false",
}
"""Settings that can be made while a session lives."""

LAUNCH_SETTINGS = {
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.ui.showConsoleProgress": "false",
}
"""Settings that a session of ours starts with."""

LATE_COMPILER = " ".join(
    f"-XX:Tier4{what}={10 * usual}"
    for what, usual in {
        "InvocationThreshold": 5_000,
        "MinInvocationThreshold": 600,
        "CompileThreshold": 15_000,
        "BackEdgeThreshold": 40_000,
    }.items()
)
"""Java compiles what it calls often once more, and better: all that plans and schedules jobs, for minutes, at the
expense of the tasks. Only what is called ten times as often, as what handles rows is, is worth it here: that halves
what the Java process costs in the first minutes."""

_LOGGING = """
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {file}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{ISO8601}} %p %c: %m%n%ex
"""


@dataclass(slots=True)
class _Home:
    """The folder of temporary files of this process's Spark: its log, its settings, what Java itself leaves about."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="penstock-spark-")))
    log_was_named: bool = False

    @property
    def log(self) -> Path:
        return self.folder / "spark.log"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def remove(self) -> None:
        """Remove it, except for a log that an error has told the user to read."""
        for path in self.folder.iterdir() if self.log_was_named else [self.folder]:
            if path != self.log:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


_home: list[_Home] = []  # one per process, as there is one Java process
_outlets: list[Outlet] = []


def log_file() -> Path:
    """Where Spark's own messages of this process are. It stays after the process, for whoever is told to read it."""
    home = _own_home()
    home.log_was_named = True
    return home.log


def open_session(master: str, name: str) -> SparkSession:
    """A session of ours on a master; Java is looked for, and Spark's own messages go to a file."""
    home = _own_home()
    java = find_java_home(home.folder)
    if java is not None:
        os.environ["JAVA_HOME"] = java
    # Python workers find the modules that the program itself finds.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {**LAUNCH_SETTINGS, **SESSION_SETTINGS, **_launch_settings(home)}
    settings |= {"spark.master": _retrying(master), "spark.app.name": name}
    try:
        _start_java(settings)
        return SparkSession.builder.config(map={**settings}).getOrCreate()
    except Exception as error:
        raise InvalidError(
            f"Spark cannot be started on {master!r} ({reason_of(error)}); check the master. All that Spark said is "
            f"in {log_file()}"
        ) from None


def close_session(session: SparkSession) -> None:
    """Stop a session of ours; what its workers have printed is shown by then."""
    session.stop()
    for outlet in _outlets:
        outlet.drain()


def tune(spark: SparkSession) -> None:
    """Make the settings that help, on a session of the user's, except where the user made them."""
    given = dict(spark.sparkContext.getConf().getAll())
    for key, value in SESSION_SETTINGS.items():
        if key not in given and key.startswith("spark.sql"):
            spark.conf.set(key, value)


def _own_home() -> _Home:
    if not _home:
        _home.append(_Home())
        atexit.register(_leave)
    return _home[0]


def _launch_settings(home: _Home) -> dict[str, str]:
    """Where Java logs and puts temporary files. A socket's path is short, so a long one means no such sockets."""
    home.temporary.mkdir(exist_ok=True)
    configuration = home.folder / "log4j2.properties"
    configuration.write_text(_LOGGING.format(file=home.log))
    options = [
        f"-Dlog4j2.configurationFile={configuration.as_uri()}",
        f"-Djava.io.tmpdir={home.temporary}",
        "-XX:-UsePerfData",
        LATE_COMPILER,
    ]
    short = len(str(home.temporary)) <= MAX_SOCKET_FOLDER_CHARACTERS
    return {
        "spark.driver.extraJavaOptions": " ".join(options),
        "spark.python.unix.domain.socket.enabled": str(short).lower(),
    }


def _start_java(settings: dict[str, str]) -> None:
    """Start the Java process, unless this process has one, so that what it prints can be told from noise."""
    calls = logging.getLogger("py4j")
    if calls.level == logging.NOTSET:
        calls.setLevel(logging.WARNING)
    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        return
    outlet = Outlet()
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    gateway = launch_gateway(conf, {"stderr": outlet.write_end})  # type: ignore[no-untyped-call]
    outlet.open()
    _outlets.append(outlet)
    SparkContext._ensure_initialized(gateway=gateway)


def _leave() -> None:
    """When this process ends, its Java has ended, and its temporary files are gone."""
    gateway = SparkContext._gateway
    if _outlets and gateway is not None and gateway.proc is not None:
        # Objects of Java's that are let go from here on are not reported to it: it would not be there to listen.
        gateway._gateway_client.is_connected = False
        gateway.proc.stdin.close()  # which tells it to end
        try:
            gateway.proc.wait(MAX_EXIT_SECONDS)
        except Exception:
            gateway.proc.kill()
    _own_home().remove()


def _retrying(master: str) -> str:
    """A local master that tries a task again when its Python worker dies; without that, `local[*]` never does."""
    match = _LOCAL.fullmatch(master)
    return master if match is None else f"local[{match.group(2) or 1},{TASK_FAILURES}]"


def reason_of(error: Exception) -> str:
    """What Spark complains of, in a sentence without the names of its classes.

    >>> reason_of(Exception("An error occurred while calling o7.x.\\n: a.b.SparkException: No master: 'x'\\n\\tat"))
    "No master: 'x'"
    """
    said = str(error)
    for sign, meaning in _MEANINGS.items():
        if sign in said:
            return meaning
    lines = [line.strip(": ") for line in said.splitlines() if line.strip() and not line.startswith(_CALLED)]
    reason = _CLASS.sub("", lines[0]) if lines else type(error).__name__
    return reason.rstrip(".:")[:MAX_REASON_CHARACTERS]
