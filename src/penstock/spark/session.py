"""The Spark session: settings that make an epoch short and partitions stable, where the user has set none."""

import os
import re
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.errors import InvalidError
from penstock.spark.java import find_java_home

TASK_FAILURES = 4
_LOCAL = re.compile(r"local(\[(\*|\d+)\])?")

SESSION_SETTINGS = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
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
    "spark.python.unix.domain.socket.enabled": "true",
}
"""Settings that a session of ours starts with."""

_LOGGING = """
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {file}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{ISO8601}} %p %c: %m%n%ex
"""


def log_file() -> Path:
    """Where Spark's own messages of this process go."""
    return Path(tempfile.gettempdir()) / f"penstock-spark-{os.getpid()}.log"


def open_session(master: str, name: str) -> SparkSession:
    """A session of ours on a master; Java is looked for, and Spark's own messages go to a file."""
    home = find_java_home()
    if home is not None:
        os.environ["JAVA_HOME"] = home
    # Python workers find the modules that the program itself finds.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = Path(tempfile.mkdtemp(prefix="penstock-log-")) / "log4j2.properties"
    settings.write_text(_LOGGING.format(file=log_file()))
    builder = SparkSession.builder.appName(name).master(_retrying(master))
    builder = builder.config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={settings.as_uri()}")
    for key, value in {**LAUNCH_SETTINGS, **SESSION_SETTINGS}.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except Exception as error:
        raise InvalidError(
            f"Spark cannot be started on {master!r} ({_first_line(error)}); see {log_file()}, and check the master"
        ) from error


def tune(spark: SparkSession) -> None:
    """Make the settings that help, on a session of the user's, except where the user made them."""
    given = dict(spark.sparkContext.getConf().getAll())
    for key, value in SESSION_SETTINGS.items():
        if key not in given and key.startswith("spark.sql"):
            spark.conf.set(key, value)


def _retrying(master: str) -> str:
    """A local master that tries a task again when its Python worker dies; without that, `local[*]` never does."""
    match = _LOCAL.fullmatch(master)
    return master if match is None else f"local[{match.group(2) or 1},{TASK_FAILURES}]"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
