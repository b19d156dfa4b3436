"""The test driver: send, epoch, received, state, advance_time, crash, restart, and crash marks in the data."""

from datetime import timedelta

import lmdb
import pytest

from penstock import Application, Event, InvalidError, LogicError
from penstock.testing import CRASH, Crash, FaultyStorage, ManualClock, TestDriver


def counting(**settings):
    app = Application("app", **settings)
    stream = app.dataframe(app.topic("in")).stateful_map("count", lambda k, v, n: ([v, n + 1], n + 1), default=0)
    stream.to_topic(app.topic("out"))
    return app


def values(driver, topic="out"):
    return [event.value for event in driver.received(topic)]


def test_what_is_sent_is_processed_with_the_next_epoch():
    driver = TestDriver(counting())
    driver.send("in", "x", key="a")
    assert values(driver) == []
    driver.epoch()
    assert values(driver) == [["x", 1]]
    driver.epoch()
    assert values(driver) == [["x", 1]]


def test_it_touches_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    driver = TestDriver(counting(local_dir=tmp_path / "local"))
    driver.send("in", "x", key="a")
    driver.epoch()
    assert list(tmp_path.iterdir()) == []


def test_received_gives_events_with_everything():
    app = counting()
    driver = TestDriver(app)
    driver.send(app.topic("in"), "x", key="a", timestamp_ms=5, headers=(("h", b"1"),))
    driver.epoch()
    assert driver.received(app.topic("out")) == [Event("a", ["x", 1], 5, (("h", b"1"),), "out", 0)]
    assert driver.received("in") == [Event("a", "x", 5, (("h", b"1"),), "in", 0)]
    assert driver.received("never heard of") == []


def test_time_stands_still_until_it_is_moved():
    driver = TestDriver(counting(), clock=ManualClock(100))
    driver.send("in", 1, key="a")
    driver.advance_time(5)
    driver.send("in", 2, key="a")
    driver.advance_time(timedelta(seconds=1))
    driver.send("in", 3, key="a")
    assert [event.timestamp_ms for event in driver.received("in")] == [100, 105, 1105]


def test_a_clock_that_goes_back_breaks_no_epoch():
    driver = TestDriver(counting(snapshots=timedelta(milliseconds=10)), clock=ManualClock(10_000))
    for n, delta in enumerate((0, -5000, -4999, 20_000, -30_000, 1)):
        driver.advance_time(delta)
        driver.send("in", n, key="a")
        driver.epoch()
        if n == 2:
            driver.crash()
            driver.restart()
    assert values(driver) == [[n, n + 1] for n in range(6)]
    assert driver.view.clock_ms == 20_001


def test_state_is_that_of_the_last_committed_epoch():
    driver = TestDriver(counting())
    assert dict(driver.state("count")) == {}
    driver.send("in", "x", key="a")
    assert dict(driver.state("count")) == {}
    driver.epoch()
    before = driver.state("count")
    driver.send("in", "y", key="a")
    driver.epoch()
    assert dict(driver.state("count")) == {"a": 2}
    assert dict(before) == {"a": 1}


def test_state_compares_and_shows_like_a_dict():
    driver = TestDriver(counting())
    driver.send("in", "x", key="a")
    driver.epoch()
    state = driver.state("count")
    assert state == {"a": 1}
    assert state != {"a": 2}
    assert state != {"b": 1}
    assert state != {}
    assert repr(state) == "{'a': 1}"
    assert (len(state), "a" in state, "b" in state, state.get("b")) == (1, True, False, None)
    with pytest.raises(KeyError):
        state["b"]


@pytest.mark.parametrize("step", ["sum", "from in", "to out"])
def test_state_of_a_step_that_has_none_names_those_that_have(step):
    with pytest.raises(InvalidError, match=f"there is no stateful step '{step}'; there are: count"):
        TestDriver(counting()).state(step)


@pytest.mark.parametrize("local", [False, True])
def test_a_crash_between_epochs_loses_nothing(tmp_path, local):
    driver = TestDriver(counting(), local_dir=tmp_path if local else None)
    for n in range(5):
        driver.send("in", n, key="a")
        driver.epoch()
        driver.crash()
        driver.restart()
    assert values(driver) == [[n, n + 1] for n in range(5)]
    assert dict(driver.state("count")) == {"a": 5}


@pytest.mark.parametrize("marked", [False, True])
def test_a_crashed_run_lets_go_of_its_local_files(tmp_path, marked):
    driver = TestDriver(counting(partitions=1), local_dir=tmp_path)
    driver.send("in", "x", key="a")
    driver.epoch()
    if marked:
        driver.send_all("in", [CRASH, "y"], key="a")
        with pytest.raises(Crash):
            driver.epoch()
    else:
        driver.crash()
    [lock] = tmp_path.rglob("lock.mdb")
    lmdb.open(str(lock.parent)).close()  # refused while this process has it open
    driver.restart()
    driver.epoch()
    assert values(driver) == [["x", 1], ["y", 2]][: 1 + marked]


def test_after_a_crash_nothing_can_be_done_but_restart():
    driver = TestDriver(counting())
    driver.crash()
    for what in (driver.epoch, lambda: driver.state("count"), lambda: driver.counts, driver.close):
        with pytest.raises(InvalidError, match=r"call restart\(\)"):
            what()
    driver.send("in", "x", key="a")  # the topics are not the run's
    driver.restart()
    driver.epoch()
    assert values(driver) == [["x", 1]]


def test_restart_without_a_crash_ends_the_run_properly():
    driver = TestDriver(counting())
    driver.send("in", "x", key="a")
    driver.epoch()
    driver.restart()
    driver.send("in", "y", key="a")
    driver.epoch()
    assert values(driver) == [["x", 1], ["y", 2]]


@pytest.mark.parametrize("partitions", [1, 4, 7])
def test_a_crash_mark_kills_the_run_once(partitions):
    driver = TestDriver(counting(partitions=partitions))
    driver.send_all("in", ["a", CRASH, "b", "c", CRASH, "d"], key="k")
    for _ in range(2):
        with pytest.raises(Crash):
            driver.epoch()
        driver.restart()
    driver.epoch()
    assert values(driver) == [["a", 1], ["b", 2], ["c", 3], ["d", 4]]
    assert [event.value for event in driver.received("in")] == ["a", "b", "c", "d"]


def test_a_crash_mark_at_the_end_of_the_data_marks_what_is_sent_next():
    driver = TestDriver(counting())
    driver.send_all("in", ["a", CRASH], key="k")
    driver.send_all("in", ["b"], key="k")
    with pytest.raises(Crash):
        driver.epoch()
    driver.restart()
    driver.epoch()
    assert values(driver) == [["a", 1], ["b", 2]]


def test_crash_marks_are_no_values():
    driver = TestDriver(counting())
    with pytest.raises(InvalidError, match="send_all"):
        driver.send("in", CRASH, key="k")


def test_a_marked_value_may_be_of_any_codec():
    app = Application("app")
    app.dataframe(app.topic("in", value="bytes")).to_topic(app.topic("out", value="bytes"))
    driver = TestDriver(app)
    driver.send_all("in", [CRASH, b"\x00raw"], key="k")
    with pytest.raises(Crash):
        driver.epoch()
    driver.restart()
    driver.epoch()
    assert values(driver) == [b"\x00raw"]


def test_looking_at_a_topic_does_not_set_off_a_crash_mark():
    driver = TestDriver(counting())
    driver.send_all("in", [CRASH, "a"], key="k")
    assert values(driver, "in") == ["a"]
    with pytest.raises(Crash):
        driver.epoch()


def test_keys_of_send_all_may_be_a_function_of_the_value():
    driver = TestDriver(counting())
    driver.send_all("in", ["a", "b", "a"], key=str.upper)
    driver.epoch()
    assert dict(driver.state("count")) == {"A": 2, "B": 1}


def test_an_error_of_the_users_function_leaves_the_run_alive():
    app = Application("app")
    app.dataframe(app.topic("in")).map(lambda n: 1 // n).to_topic(app.topic("out"))
    driver = TestDriver(app)
    driver.send("in", 0)
    with pytest.raises(LogicError):
        driver.epoch()
    assert driver.view.epoch == -1
    assert driver.counts.read == 0


@pytest.mark.parametrize("where", ["storage", "topics"])
@pytest.mark.parametrize("when", ["die_before", "die_after"])
def test_storages_may_die_at_any_write(where, when):
    for at in range(1, 60):
        driver = TestDriver(counting(partitions=2))
        state, topics = driver._storage, driver._topic_storage
        driver.send_all("in", ["x", "y"], key="a")
        driver.crash()
        inner = state if where == "storage" else topics
        faulty = FaultyStorage(inner, **{when: at})
        died = False
        try:
            driver.restart(**{where: faulty})
            driver.epoch()
        except Crash:
            died = True
        driver.crash()
        driver.restart(storage=state, topics=topics)
        driver.epoch()
        assert values(driver) == [["x", 1], ["y", 2]], at
        assert dict(driver.state("count")) == {"a": 2}
        if not died:
            return
    pytest.fail("the protocol has no end")


def test_two_drivers_of_one_seed_write_the_same_names():
    names = []
    for _ in range(2):
        driver = TestDriver(counting(), seed=5)
        driver.send("in", "x", key="a")
        driver.epoch()
        names.append(driver._storage.list(""))
    assert names[0] == names[1]


def test_an_application_may_have_many_drivers():
    app = counting()
    drivers = [TestDriver(app), TestDriver(app)]
    drivers[0].send("in", "x", key="a")
    for driver in drivers:
        driver.epoch()
    assert [len(values(driver)) for driver in drivers] == [1, 0]


def test_a_topic_opened_after_the_driver_was_made_is_read_with_its_codec():
    app = counting()
    driver = TestDriver(app)
    driver.received("late")
    app.topic("late", value="str")
    driver.send("late", "text", key="a")
    assert values(driver, "late") == ["text"]


def test_a_plan_that_grew_is_run_by_the_next_run():
    app = counting()
    driver = TestDriver(app)
    driver.send("in", "x", key="a")
    driver.epoch()
    app.dataframe(app.topic("in")).map(str.upper).to_topic(app.topic("more"))
    driver.restart()
    driver.send("in", "y", key="a")
    driver.epoch()
    assert values(driver, "more") == ["Y"]
