"""The events of all workloads: payments of customers in shops, the same for the same seed on every machine.

Numbers are drawn by numpy's PCG64, whose streams do not change between versions; JSON is written by hand, so a byte of
the input depends on nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

SHOPS = 1_000
MAX_AMOUNT = 10_000
PER_CHUNK = 100_000
OLDEST = 50_000_000
"""Where the numbers of customers begin who have paid long ago."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Payments:
    """Payments as columns; the place of a payment is its number."""

    customers: Ints
    shops: Ints
    amounts: Ints

    def __len__(self) -> int:
        return len(self.customers)

    def first(self, count: int) -> "Payments":
        """The first so many."""
        return Payments(self.customers[:count], self.shops[:count], self.amounts[:count])

    def values(self, start: int, end: int) -> Iterator[bytes]:
        """The payments from start to before end as JSON."""
        columns = (column[start:end].tolist() for column in (self.customers, self.shops, self.amounts))
        for number, (customer, shop, amount) in enumerate(zip(*columns, strict=True), start):
            yield b'{"payment":%d,"customer":"customer-%08d","shop":"shop-%04d","amount":%d}' % (
                number,
                customer,
                shop,
                amount,
            )


def draw(count: int, customers: int, seed: int = 2024) -> Payments:
    """Payments of customers drawn evenly; of as many customers as payments or more, each pays once before any again.

    >>> draw(3, 10).amounts.tolist() == draw(3, 10).amounts.tolist()
    True
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    shops = generator.integers(0, SHOPS, count)
    amounts = generator.integers(1, MAX_AMOUNT, count)
    return Payments(generator.integers(0, customers, count), shops, amounts)


def shuffled(count: int, customers: int, seed: int = 2024) -> Payments:
    """Payments where every customer pays once, in random order, before any pays again.

    >>> sorted(shuffled(4, 4).customers.tolist())
    [0, 1, 2, 3]
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    rounds = [generator.permutation(customers) for _ in range(-(-count // customers))]
    payments = draw(count, customers, seed + 1)
    return Payments(np.concatenate(rounds)[:count], payments.shops, payments.amounts)


def old_payments(customers: int) -> Payments:
    """One payment of each of many customers that have paid long ago, and never pay again."""
    payments = shuffled(customers, customers, seed=1999)
    return Payments(payments.customers + OLDEST, payments.shops, payments.amounts)


def joined(first: Payments, then: Payments) -> Payments:
    """Payments behind each other; those of the second have the numbers behind the first."""
    columns = zip(_columns(first), _columns(then), strict=True)
    return Payments(*(np.concatenate(both) for both in columns))


def _columns(payments: Payments) -> tuple[Ints, Ints, Ints]:
    return payments.customers, payments.shops, payments.amounts


def write_lanes(payments: Payments, folder: Path, lanes: int) -> None:
    """JSON lines, the customers dealt out to lanes by their number, so that a customer's payments are in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [(folder / f"lane-{lane}.jsonl").open("wb") for lane in range(lanes)]
    for start in range(0, len(payments), PER_CHUNK):
        end = min(start + PER_CHUNK, len(payments))
        lane_of = (payments.customers[start:end] % lanes).tolist()
        parts: list[list[bytes]] = [[] for _ in files]
        for lane, value in zip(lane_of, payments.values(start, end), strict=True):
            parts[lane].append(value)
        for file, part in zip(files, parts, strict=True):
            file.write(b"".join(value + b"\n" for value in part))
    for file in files:
        file.close()


def write_parquet(payments: Payments, folder: Path, lanes: int, per_batch: int) -> None:
    """Files for Spark's file source: each batch one file per lane, rows in order; columns customer and value."""
    folder.mkdir(parents=True, exist_ok=True)
    for batch, start in enumerate(range(0, len(payments), per_batch)):
        end = min(start + per_batch, len(payments))
        values = pa.array(list(payments.values(start, end)), pa.binary()).cast(pa.string())
        names = pa.array([f"customer-{customer:08d}" for customer in payments.customers[start:end].tolist()])
        table = pa.table({"customer": names, "value": values})
        for lane in range(lanes):
            mine = table.filter(pa.array(payments.customers[start:end] % lanes == lane))
            pq.write_table(mine, folder / f"{batch:06d}-{lane}.parquet", row_group_size=per_batch)
