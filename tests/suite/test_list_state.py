"""ListState: a list under one key, one row for each element."""

import random

import pytest

from penstock import LogicError


def start(pipeline, fn, **settings):
    app = pipeline.application(**settings)
    app.dataframe(app.topic("in")).apply(fn, stateful=True, name="step").to_topic(app.topic("out"))
    return pipeline.start(app)


def run(driver, value=None, key="a"):
    driver.send("in", value, key=key)
    driver.epoch()
    return driver.received("out")[-1].value


def delta_rows(driver, step="step"):
    """How many rows the last epoch wrote."""
    epoch = driver.view.epoch
    refs = [ref for parts in driver.view.segments.get(step, {}).values() for ref in parts]
    return sum(ref.rows for ref in refs if ref.first_epoch == ref.last_epoch == epoch)


def commands(value, state):
    """Does what an event says to the list, and returns what each command gave, and the list."""
    numbers = state.list("l")
    found = [getattr(numbers, verb)(*rest) for verb, *rest in value]
    return [found, list(numbers), len(numbers)]


def test_elements_stay_in_order_over_epochs(pipeline):
    driver = start(pipeline, commands)
    assert run(driver, [["append", 1], ["extend", [2, 3]]]) == [[None, None], [1, 2, 3], 3]
    assert run(driver, [["append", 4]]) == [[None], [1, 2, 3, 4], 4]
    assert run(driver, [["pop_first"], ["pop"]]) == [[1, 4], [2, 3], 2]
    assert run(driver, [["pop_first"], ["append", 5], ["pop_first"]]) == [[2, None, 3], [5], 1]
    assert run(driver, [["pop"]]) == [[5], [], 0]
    assert run(driver, [["append", 6]]) == [[None], [6], 1]
    assert run(driver, [["clear"], ["clear"]]) == [[None, None], [], 0]
    assert driver.state("step") == {}


@pytest.mark.parametrize("verb", ["pop", "pop_first", "clear"])
def test_a_list_that_was_emptied_leaves_nothing_behind(pipeline, verb):
    driver = start(pipeline, commands)
    run(driver, [["append", 1]])
    run(driver, [[verb]])
    assert driver.state("step") == {}


def test_elements_by_index(pipeline):
    def use(value, state):
        numbers = state.list("l")
        numbers.extend(range(5))
        numbers.pop_first()
        numbers[0], numbers[-1] = "first", "last"
        return [numbers[0], numbers[1], numbers[-1], numbers[1:3], numbers[-2:], numbers[::-1], 3 in numbers]

    driver = start(pipeline, use)
    assert run(driver) == ["first", 2, "last", [2, 3], [3, "last"], ["last", 3, 2, "first"], True]
    assert driver.state("step") == {"a": {"l": ["first", 2, 3, "last"]}}


@pytest.mark.parametrize("use", [lambda x: x[3], lambda x: x[-4], lambda x: x.__setitem__(3, 0), lambda x: x["a"]])
def test_an_index_that_is_not_there_is_an_error(pipeline, use):
    def fn(value, state):
        state.list("l").extend([1, 2, 3])
        return use(state.list("l"))

    with pytest.raises(LogicError, match=r"IndexError: the list has 3 elements|TypeError"):
        run(start(pipeline, fn))


@pytest.mark.parametrize("verb", ["pop", "pop_first"])
def test_taking_from_an_empty_list_is_an_error(pipeline, verb):
    with pytest.raises(LogicError, match="IndexError: the list has 0 elements"):
        run(start(pipeline, commands), [[verb]])


def test_elements_are_copied_in_and_out(pipeline):
    def spoil(value, state):
        mine = [1]
        state.list("l").append(mine)
        mine.append("spoilt")
        state.list("l")[0].append("spoilt")
        for element in state.list("l"):
            element.append("spoilt")
        return list(state.list("l"))

    assert run(start(pipeline, spoil)) == [[1]]


def test_a_list_may_change_while_it_is_iterated(pipeline):
    def drain(value, state):
        numbers = state.list("l")
        numbers.extend(value)
        seen = []
        for number in numbers:
            seen.append(number)
            if number == 2:
                numbers.append(9)
                numbers.pop_first()
        return [seen, list(numbers)]

    driver = start(pipeline, drain)
    assert run(driver, [1, 2, 3])[1] == [2, 3, 9]
    assert run(driver, [4])[1] == [3, 9, 4, 9]


def test_lists_of_two_names_and_keys_are_apart(pipeline):
    def use(value, state):
        state.list("a").append(value)
        state.list("ab").append(-value)
        return [list(state.list("a")), list(state.list("ab")), list(state.list("b"))]

    driver = start(pipeline, use)
    assert run(driver, 1, key="k") == [[1], [-1], []]
    assert run(driver, 2, key="l") == [[2], [-2], []]
    assert driver.state("step") == {"k": {"a": [1], "ab": [-1]}, "l": {"a": [2], "ab": [-2]}}


def test_a_bool_says_whether_there_is_something(pipeline):
    driver = start(pipeline, lambda v, state: [bool(state.list("l")), state.list("l").append(1), bool(state.list("l"))])
    assert run(driver) == [False, None, True]


def test_appending_to_a_long_list_writes_the_element_and_its_length(pipeline):
    driver = start(pipeline, lambda value, state: state.list("l").extend(value))
    run(driver, list(range(5000)))
    run(driver, [1])
    assert delta_rows(driver) == 2


def test_a_random_life_of_a_list(pipeline, tmp_path):
    """Against a list of Python's, over epochs and restarts, on a store on disk."""
    rng = random.Random(7)
    app = pipeline.application()
    app.dataframe(app.topic("in")).apply(commands, stateful=True, name="step").to_topic(app.topic("out"))
    driver = pipeline.start(app, local_dir=tmp_path / "disk")
    oracle: list[int] = []
    for n in range(60):
        todo = []
        for _ in range(rng.randrange(6)):
            verb = rng.choice(["append", "append", "extend", "pop", "pop_first", "clear" if n % 10 == 0 else "append"])
            if verb in ("pop", "pop_first") and not oracle:
                continue
            rest = [n] if verb == "append" else [[n, n + 1]] if verb == "extend" else []
            todo.append([verb, *rest])
            oracle.pop(0) if verb == "pop_first" else getattr(oracle, verb)(*rest)
        assert run(driver, todo)[1:] == [oracle, len(oracle)]
        if n % 7 == 0:
            driver.crash()
            driver.restart()
