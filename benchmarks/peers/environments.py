"""A virtual environment for each peer, made when it is first needed, in a folder that git ignores."""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent / "environments"


class NoEnvironmentError(Exception):
    """A peer cannot be installed here."""


def interpreter(name: str, requirements: tuple[str, ...]) -> str:
    """The Python of an environment with these packages, which is made first if need be."""
    if not requirements:
        return sys.executable
    folder = ROOT / name
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if stamp.exists() and stamp.read_text().split() == list(requirements):
        return str(python)
    print(f"Installing {', '.join(requirements)} into an environment of its own.", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "pip failed").splitlines()[-1]
        raise NoEnvironmentError(
            f"{' '.join(requirements)} cannot be installed for Python {sys.version.split()[0]}: {reason}"
        )
    stamp.write_text("\n".join(requirements))
    return str(python)
