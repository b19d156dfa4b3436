"""What travels to Spark's workers arrives as it was: types of the main program above all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MAIN = """
import dataclasses, sys
import msgspec
from penstock.errors import InvalidError
from penstock.spark.packing import pack, pack_error, unpack_error
from penstock.state.codec import value_codec

@dataclasses.dataclass
class Order:
    city: str
    amount: int = 1

class Account(msgspec.Struct):
    total: int

class Boom(Exception):
    pass

value_codec(Order).decode(b'{"city": "a"}')  # msgspec has learnt the type by now
"""
THERE = """
import sys
from pyspark import cloudpickle
codec = cloudpickle.loads(sys.stdin.buffer.read())
for data in (b'{"city": "a"}', b'{"amount": 2}', b'{"city": 1}'):
    try:
        print(codec.decode(data))
    except ValueError as error:
        print("refused:", error)
"""


def run(code: str, given: bytes = b"") -> bytes:
    source = Path(__file__).parent.parent.parent / "src"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, timeout=60, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout


def test_a_dataclass_of_the_main_program_still_validates_on_the_other_side() -> None:
    packed = run(MAIN + "sys.stdout.buffer.write(pack(value_codec(Order)))")
    said = run(THERE, packed).decode().splitlines()
    assert said[0] == "Order(city='a', amount=1)"
    assert said[1] == "refused: Object missing required field `city`"
    assert said[2].startswith("refused: Expected `str`, got `int`")


def test_a_struct_of_the_main_program_is_refused_instead_of_losing_its_fields() -> None:
    said = run(MAIN + "try:\n    pack(Account)\nexcept InvalidError as error:\n    print(error)").decode()
    assert "Account is a msgspec.Struct of the program itself" in said
    assert "make it a dataclass" in said


def test_an_error_travels_with_its_class() -> None:
    said = run(MAIN + "back = unpack_error(pack_error(Boom(7)))\nprint(type(back) is Boom, back.args)").decode()
    assert said.strip() == "True (7,)"


@pytest.mark.parametrize("error", ["ValueError(__import__('threading').Lock())", "None"])
def test_an_error_that_cannot_travel_is_left_out(error: str) -> None:
    assert run(MAIN + f"print(unpack_error(pack_error({error})))").decode().strip() == "None"
