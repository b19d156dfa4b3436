"""The benchmark's own parts: the same input every time, wrong results noticed, figures worked out as they say."""

import doctest
import json
from pathlib import Path

import pytest
from benchmarks.breakdown import clocks
from benchmarks.peers import checks, figures, job, measure, payments, report
from benchmarks.peers.catalogue import AIMS, PEERS, WORKLOADS, Aim
from benchmarks.peers.checks import WrongError, check_outputs, check_state, read_outputs
from benchmarks.peers.job import Job, read_job, write_job
from benchmarks.peers.measure import Outcome
from benchmarks.peers.payments import Payments, draw, joined, old_payments, shuffled, write_lanes, write_parquet

PAYMENTS = draw(500, 20)


def outputs_of(source: Payments, order: list[int] | None = None) -> list[dict]:
    """Right outputs, by a loop, with the payments added up in some order."""
    customers: dict[str, int] = {}
    shops: dict[str, int] = {}
    values = [json.loads(value) for value in source.values(0, len(source))]
    outputs = []
    for number in order or range(len(values)):
        value = values[number]
        customers[value["customer"]] = customers.get(value["customer"], 0) + value["amount"]
        shops[value["shop"]] = shops.get(value["shop"], 0) + value["amount"]
        outputs.append({**value, "total": customers[value["customer"]], "shop_total": shops[value["shop"]]})
    return outputs


def check(outputs: list[dict], in_order: bool = True) -> None:
    check_outputs(PAYMENTS, [json.dumps(output).encode() for output in outputs], in_order, shops=True)


@pytest.mark.parametrize(
    "module", [checks, clocks, figures, job, measure, payments, report], ids=lambda module: module.__name__
)
def test_examples_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_payments_are_the_same_every_time() -> None:
    again = draw(500, 20)
    assert list(again.values(0, 500)) == list(PAYMENTS.values(0, 500))
    first = b'{"payment":0,"customer":"customer-00000019","shop":"shop-0241","amount":3098}'
    assert next(PAYMENTS.values(0, 1)) == first


def test_a_peer_that_is_given_less_is_given_the_first_of_the_same_payments() -> None:
    for key in ("A", "B"):
        few, more = WORKLOADS[key].payments(10), WORKLOADS[key].payments(2_000_000)
        assert list(few.values(0, 10)) == list(more.values(0, 10))


def test_every_customer_pays_once_before_any_pays_again() -> None:
    customers = shuffled(25, 10).customers.tolist()
    assert sorted(customers[:10]) == sorted(customers[10:20]) == list(range(10))


def test_lanes_and_files_hold_every_payment_once(tmp_path: Path) -> None:
    write_lanes(PAYMENTS, tmp_path / "lanes", 2)
    write_parquet(PAYMENTS, tmp_path / "files", 2, per_batch=100)
    work = Job("A", 300, 2, tmp_path / "lanes", tmp_path / "work")
    first = [value for lane in range(2) for value in work.lane(lane)]
    assert sorted(first) == sorted(PAYMENTS.values(0, 300))
    assert sorted(read_outputs(tmp_path / "files")) == sorted(PAYMENTS.values(0, 500))


def test_right_outputs_are_right() -> None:
    check(outputs_of(PAYMENTS))


def test_another_order_is_right_only_for_a_peer_without_order() -> None:
    outputs = outputs_of(PAYMENTS, list(reversed(range(500))))
    check(outputs, in_order=False)
    with pytest.raises(WrongError, match="so far"):
        check(outputs)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda outputs: outputs[:-1], "499 outputs of 500"),
        (lambda outputs: [*outputs, outputs[0]], "501 outputs of 500"),
        (lambda outputs: [*outputs[:-1], outputs[0]], "missing"),
        (lambda outputs: [{**outputs[0], "amount": 1}, *outputs[1:]], "another amount"),
        (lambda outputs: [{**outputs[0], "customer": "customer-00000099"}, *outputs[1:]], "another customer"),
        (lambda outputs: [{**outputs[0], "total": 1}, *outputs[1:]], "total"),
        (lambda outputs: [*outputs[:-1], {**outputs[-1], "shop_total": 1}], "totals of a shop"),
    ],
    ids=["lost", "doubled", "lost and doubled", "amount", "customer", "total", "shop's total"],
)
def test_wrong_outputs_are_rejected(damage, message: str, in_order: bool) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WrongError, match=message):
        check(damage(outputs_of(PAYMENTS)), in_order)


def test_wrong_state_is_rejected() -> None:
    state = {output["customer"]: output["total"] for output in outputs_of(PAYMENTS)}
    check_state(PAYMENTS, state)
    one = next(iter(state))
    for wrong in ({**state, one: 1}, {**state, "customer-99999999": 1}, {k: v for k, v in state.items() if k != one}):
        with pytest.raises(WrongError, match="state of"):
            check_state(PAYMENTS, wrong)


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = Job("A", 3, 2, tmp_path / "input", tmp_path / "work", {"epoch": 10})
    assert read_job(write_job(written)) == written


def test_too_few_marks_give_no_figure() -> None:
    with pytest.raises(ValueError, match="too few"):
        figures.sustained([[(1.0, 100)]])


def test_aims_are_judged_by_ratio_or_by_figure() -> None:
    outcomes = [
        Outcome("A", "penstock", 1, {"events/s": 100.0, "ms": 5.0}),
        Outcome("A", "quix", 1, {"events/s": 10.0}),
    ]
    aims = [
        Aim("ratio", "A penstock events/s", "A quix events/s", at_least=10),
        Aim("time", "A penstock ms", at_most=4),
        Aim("unknown", "A penstock events/s", "A bytewax events/s", at_least=1),
    ]
    assert [(v.found, v.holds) for v in report.judge(aims, outcomes)] == [(10.0, True), (5.0, False), (None, None)]


def test_aims_name_what_is_measured() -> None:
    for aim in AIMS:
        for name in filter(None, (aim.figure, aim.over)):
            workload, peer, _ = name.split(" ", 2)
            assert workload in PEERS[peer].portions, f"{name} is never measured"


def test_old_customers_are_others_than_those_who_pay_now() -> None:
    both = joined(old_payments(50), PAYMENTS)
    assert len(both) == 550
    assert not set(both.customers[:50].tolist()) & set(PAYMENTS.customers.tolist())


def test_the_profile_knows_the_functions_it_puts_clocks_around() -> None:
    for name in clocks.every_name():
        clocks.find(name)
