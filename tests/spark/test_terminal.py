"""What a program that runs an application prints: its own tracebacks and our sentences, nothing of Java's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys, traceback
from penstock import Application

def rate(amount):
    return 100 / amount

def rated(value, state):
    return rate(value["amount"])

def die(value):
    os.kill(os.getpid(), signal.SIGKILL)

def tell(value):
    print("told", value)
    return value

raw = Application("raw").topic("orders", value="bytes")
with raw.producer() as send:
    send(b'{"amount": 0}', key="anna")
broken = Application("raw").topic("broken", value="bytes")
with broken.producer() as send:
    send(b'{"amount": ', key="bob")

def run(group, topic, function, stateful=False, **settings):
    app = Application(group)
    app.dataframe(app.topic(topic)).apply(function, stateful=stateful).to_topic(app.topic(group + "-out"))
    try:
        app.run(until="caught-up", **settings)
    except Exception:
        traceback.print_exc()
    print("=== end", file=sys.stderr, flush=True)

run("rates", "orders", rated, stateful=True)
run("decoded", "broken", str)
run("killed", "orders", die)
run("elsewhere", "orders", str, master="nowhere")
run("fine", "orders", tell)
"""

WAITING = """
from penstock import Application

app = Application("waiting")
app.dataframe(app.topic("orders")).apply(str).to_topic(app.topic("texts"))
with app.topic("orders").producer() as send:
    send(1, key="anna")
app.run()
print("goes on")
"""


def python(folder: Path, text: str) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir()
    (folder / "program.py").write_text(text)
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "program.py"]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_errors_are_the_users_traceback_and_a_sentence(tmp_path: Path) -> None:
    _, err = python(tmp_path, PROGRAM).communicate(timeout=600)
    rates, decoded, killed, elsewhere, fine, rest = err.split("=== end\n")
    assert 'in rated\n    return rate(value["amount"])' in rates
    assert "in rate\n    return 100 / amount" in rates
    assert "step 'rated', function rated (program.py:8), key 'anna', topic 'orders', offset 0: ZeroDivision" in rates
    assert "The epoch was not committed, so nothing is lost" in rates
    assert "topic 'broken', offset 0" in decoded
    assert "cannot be read as json" in decoded
    assert "a Python worker died" in killed
    assert "Spark cannot be started on 'nowhere'" in elsewhere
    assert "master" in elsewhere
    for said in (rates, decoded, killed, elsewhere):
        assert said.count("Traceback") == 1
        assert said.count("/penstock/") <= 1, "frames of ours"
        assert "\tat " not in said, "frames of Java's"
        assert len(said.splitlines()) < 20
    assert fine == "told {'amount': 0}\n"
    assert rest == ""
    [log] = (tmp_path / "tmp").glob("penstock-spark-*/*")
    assert log.name == "spark.log"
    assert str(log) in killed
    assert "Python worker exited unexpectedly" in log.read_text()


def test_ctrl_c_ends_the_program_after_the_epoch_without_a_traceback(tmp_path: Path) -> None:
    process = python(tmp_path, WAITING)
    output = tmp_path / "topics" / "texts"
    try:
        while process.poll() is None and not list(output.glob("*.parquet")):
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "goes on\n", "")
    assert (tmp_path / "state" / "waiting" / "runs" / f"{1:020d}.ended").exists()
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("penstock-spark-")]
