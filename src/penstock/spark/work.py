"""What the tasks of an epoch are told, and how."""

import base64
import zlib

import msgspec
from pyspark import TaskContext

from penstock.epochs.coordinator import Assignment
from penstock.topics import Slice

WORK = "penstock.work"
"""The local property of Spark's in which tasks find what the epoch is about."""
DESCRIPTORS = "descriptors"
"""The column of a batch of topics: a row tells the task of a partition what to read."""

Slices = dict[int, tuple[Slice, ...]]
"""What to read of the topics, by the ids of the steps that read them."""
unpack_slices = msgspec.msgpack.Decoder(Slices).decode


class EpochWork(msgspec.Struct, frozen=True):
    """What the tasks of one epoch are told: the state they start from, and what to read of the topics."""

    assignment: Assignment
    slices: Slices


def pack_work(work: EpochWork) -> str:
    """What the tasks of an epoch are told, as a property that Spark sends along with each of them.

    Not as part of the function that they run: that stays the same, so Spark plans it once and not in each epoch.
    """
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(work), level=1)).decode()


def told() -> tuple[EpochWork, int]:
    """What the task that asks was told, and the number of its partition."""
    context = TaskContext.get()
    assert context is not None, "only tasks are told"
    text = context.getLocalProperty(WORK)
    assert text is not None, "the driver tells every task of an epoch what it is about"
    return unpack_work(text), context.partitionId()


def unpack_work(text: str) -> EpochWork:
    """The inverse of pack_work."""
    return msgspec.msgpack.decode(zlib.decompress(base64.b64decode(text)), type=EpochWork)


def pack_slices(slices: Slices) -> bytes:
    """What a task is to read of the topics, as a row has it."""
    return msgspec.msgpack.encode(slices)
