"""The demonstration, in small: it proves what it says, and leaves nothing running and nothing lying about."""

import os
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parent.parent.parent / "examples" / "demo.py"


def test_the_demonstration_counts_every_payment_once_and_leaves_nothing(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, str(DEMO), "--payments", "20000", "--customers", "500", "--seconds", "3"],
        env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert "killed with SIGKILL" in said.stdout
    assert "500 of 500" in said.stdout
    assert "20,000 of 20,000" in said.stdout
    assert "Every payment counted exactly once." in said.stdout
    assert not said.stderr
    assert not list(tmp_path.iterdir())
