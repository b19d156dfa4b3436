"""What all tests share. PENSTOCK_HYPOTHESIS_PROFILE chooses how hypothesis looks for examples: `default` or `soak`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The contract suites live in the library; this makes their plain asserts say what they compared.
pytest.register_assert_rewrite("penstock.testing.contracts")

# Real disks and servers have no steady pace, so no deadline; a failure prints the blob that replays it.
settings.register_profile("default", deadline=None, derandomize=False, print_blob=True)
settings.register_profile(
    "soak",
    parent=settings.get_profile("default"),
    max_examples=5_000,
    stateful_step_count=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("PENSTOCK_HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What happens beside other tests is looked at last."""
    items.sort(key=lambda item: item.get_closest_marker("beside") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    for module in {item.module: None for item in session.items if item.get_closest_marker("beside")}:
        session.config.add_cleanup(module.begin())


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """One Spark for all tests: starting it takes longer than most of them."""
    from penstock.spark.session import open_session

    os.environ["PYSPARK_SUBMIT_ARGS"] = "--conf spark.ui.enabled=false pyspark-shell"
    session = open_session("local[2]", "tests")
    del os.environ["PYSPARK_SUBMIT_ARGS"]
    yield session
    session.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this system lets nobody mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
