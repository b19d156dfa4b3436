"""Whether a process still runs, told from a later one of the same number."""

import os
import subprocess
import sys

import msgspec
import pytest

from penstock import process
from penstock.process import Owner, is_running, this_boot, this_process

TELL_AND_WAIT = """
import sys, msgspec
from penstock.process import this_process
sys.stdout.buffer.write(msgspec.json.encode(this_process()) + b"\\n"); sys.stdout.flush()
sys.stdin.read()
"""


def test_this_process_is_running() -> None:
    assert this_process() == this_process()
    assert this_process().pid == os.getpid()
    assert is_running(this_process()) is True


def test_killed_process_is_not_running_even_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", TELL_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        owner = msgspec.json.decode(child.stdout.readline(), type=Owner)
        assert owner.pid == child.pid
        assert is_running(owner) is True
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the table of processes
        assert is_running(owner) is False
    finally:
        child.kill()
        child.communicate()
    assert is_running(owner) is False


def test_later_process_of_the_same_number_is_another() -> None:
    assert is_running(msgspec.structs.replace(this_process(), started="long ago")) is False


def test_process_of_another_host_is_unknown() -> None:
    assert is_running(msgspec.structs.replace(this_process(), host="elsewhere")) is None


@pytest.mark.skipif(sys.platform != "linux", reason="what tells boots apart is known on Linux only")
def test_boot_is_known_and_part_of_when_a_process_started() -> None:
    assert this_boot()
    assert this_boot() in this_process().started


def test_program_name_with_brackets_does_not_confuse(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = " ".join(str(n) for n in range(4, 40))
    monkeypatch.setattr(process.Path, "read_text", lambda self: f"7 (evil) Z 1 2) S {numbers}\n")
    assert process._start_of(7) == f"{this_boot()} 22"


def test_without_proc_a_number_in_use_is_taken_for_the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()

    def no_such_file(self: object) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(process.Path, "read_text", no_such_file)
    monkeypatch.setattr(process.Path, "exists", lambda self: False)
    assert this_boot() == ""
    assert is_running(this_process()) is True
    assert is_running(Owner(this_process().host, child.pid, "")) is False
