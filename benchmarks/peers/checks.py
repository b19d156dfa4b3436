"""Whether a peer computed the right thing: its figure counts only then.

Outputs are compared with totals computed from the columns of the input, by numpy, in a few lines that no peer shares.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
from benchmarks.peers.payments import Ints, Payments


class WrongError(Exception):
    """A peer's outputs or its state are not what they must be."""


class Output(msgspec.Struct):
    """What is looked at of an output."""

    payment: int
    customer: str
    shop: str
    amount: int
    total: int
    shop_total: int = 0


def read_outputs(folder: Path) -> Iterator[bytes]:
    """The outputs in a folder: the column `value` of its Parquet files, and the lines of its JSON files."""
    for path in sorted(folder.rglob("*.parquet")):
        yield from pq.read_table(path, columns=["value"], partitioning=None).column(0).cast("binary").to_pylist()
    for path in sorted(folder.rglob("*.jsonl")):
        with path.open("rb") as lines:
            yield from (line.rstrip(b"\n") for line in lines)


def running_totals(groups: Ints, amounts: Ints) -> Ints:
    """The sum of each payment's group up to and with that payment.

    >>> running_totals(np.array([1, 2, 1]), np.array([5, 7, 6])).tolist()
    [5, 7, 11]
    """
    order = np.argsort(groups, kind="stable")
    sums = np.cumsum(amounts[order])
    firsts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    before = np.repeat(sums[firsts] - amounts[order][firsts], np.diff(np.append(firsts, len(groups))))
    totals = np.empty_like(sums)
    totals[order] = sums - before
    return totals


def check_outputs(payments: Payments, outputs: Iterable[bytes], in_order: bool, shops: bool = False) -> None:
    """Every payment came out once, unchanged, with a right total; raises WrongError otherwise.

    `in_order`: a customer's payments were added up in the order of the input. Otherwise any order will do, as long as
    the totals of a customer are those of one: what an engine without a promise of order can be held to. Totals of
    shops (`shops`), whose payments come from many tasks, are always held to some order.
    """
    columns = _columns(payments, outputs)
    number = columns["payment"]
    if len(number) != len(payments):
        raise WrongError(f"{len(number):,} outputs of {len(payments):,} payments")
    if not np.array_equal(np.sort(number), np.arange(len(payments))):
        raise WrongError("a payment is missing, and another came out twice")
    for what in ("customer", "shop", "amount"):
        sent = {"customer": payments.customers, "shop": payments.shops, "amount": payments.amounts}[what]
        if not np.array_equal(columns[what], sent[number]):
            raise WrongError(f"an output has another {what} than its payment")
    if in_order and not np.array_equal(columns["total"], running_totals(payments.customers, payments.amounts)[number]):
        raise WrongError("a total is not the sum of the customer's payments so far")
    _check_chain("customer", columns["customer"], columns["amount"], columns["total"])
    if shops:
        _check_chain("shop", columns["shop"], columns["amount"], columns["shop_total"])


def check_state(payments: Payments, state: Mapping[str, int]) -> None:
    """The state holds every customer's total, and nothing else."""
    sums = np.bincount(payments.customers, payments.amounts).astype(np.int64)
    there = np.unique(payments.customers)
    expected = {f"customer-{customer:08d}": int(sums[customer]) for customer in there.tolist()}
    if state != expected:
        wrong = sum(1 for key, total in expected.items() if state.get(key) != total)
        raise WrongError(f"the state of {wrong:,} customers of {len(expected):,} is wrong, of {len(state):,} stored")


def read_state(path: Path) -> dict[str, int]:
    """The state as a program left it: JSON lines of a customer and a total."""
    with path.open("rb") as lines:
        return dict(map(msgspec.json.Decoder(tuple[str, int]).decode, lines))


def _columns(payments: Payments, outputs: Iterable[bytes]) -> dict[str, Ints]:
    decode = msgspec.json.Decoder(Output).decode
    rows = np.empty((6, len(payments)), np.int64)
    count = 0
    for value in outputs:
        out = decode(value)
        if count < len(payments):
            rows[:, count] = (
                out.payment,
                int(out.customer[9:]),
                int(out.shop[5:]),
                out.amount,
                out.total,
                out.shop_total,
            )
        count += 1
    if count > len(payments):
        raise WrongError(f"{count:,} outputs of {len(payments):,} payments")
    names = ("payment", "customer", "shop", "amount", "total", "shop_total")
    return {name: row[:count] for name, row in zip(names, rows, strict=True)}


def _check_chain(what: str, groups: Ints, amounts: Ints, totals: Ints) -> None:
    """In the order of its totals, each is the one before and its own amount: amounts are never zero."""
    order = np.lexsort((totals, groups))
    first = np.diff(groups[order], prepend=-1) != 0
    before = np.where(first, 0, np.concatenate(([0], totals[order][:-1])))
    if not np.array_equal(totals[order] - before, amounts[order]):
        raise WrongError(f"the totals of a {what} do not follow from its payments in any order")
