"""Clocks around functions of Penstock's, put there from outside: the library itself knows nothing of them.

A clock counts the time that a function takes itself, without that of other functions with a clock inside of it, so
the phases of a task add up to the task.
"""

import functools
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

DRIVER = {
    "look for new events": ["penstock.runner:Run.is_caught_up", "penstock.runner:Run.new_events"],
    "assign": ["penstock.epochs.coordinator:Coordinator.assign"],
    "the job": ["penstock.spark.engine:SparkRunner._execute"],
    "commit": ["penstock.epochs.coordinator:Coordinator.check", "penstock.epochs.coordinator:Coordinator.commit"],
    "publish": ["penstock.epochs.coordinator:Coordinator.publish"],
}
"""What a driver does in an epoch. The rest of an epoch is `other`."""

TASK = {
    "restore or catch up": ["penstock.state.replica:Replicas.at"],
    "read": ["penstock.task:read_topic", "penstock.task:read_exchange", "penstock.task:in_key_order"],
    "number the keys": ["penstock.task:number_keys"],
    "decode": ["penstock.inputs:Input.batch"],
    "user code, with its state": [
        "penstock.operators:StatefulMapOperator.process",
        "penstock.operators:CallOperator.process",
        "penstock.logic:StatefulOpOperator.process",
        "penstock.logic:StatefulOpOperator.finish",
    ],
    "encode": ["penstock.outputs:SinkOutput.add"],
    "send on": ["penstock.exchange:Outgoing.add", "penstock.exchange:Outgoing.table"],
    "write outputs": ["penstock.outputs:SinkOutput.table", "penstock.task:_Task._write_outbox"],
    "write state": ["penstock.state.overlay:KeyedState.delta", "penstock.task:write_segment"],
    "compact": ["penstock.task:compact"],
}
"""What a task does. The rest of a task is `other`."""


@dataclass(slots=True)
class Clocks:
    """Seconds by phase, and the phases that are under way just now, the innermost last."""

    seconds: dict[str, float] = field(default_factory=dict)
    _open: list[float] = field(default_factory=list)

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a clock that runs while it does, and none inside of it does.

        >>> clocks = Clocks()
        >>> inner = clocks.around("inner", lambda: time.sleep(0.02))
        >>> clocks.around("outer", inner)()
        >>> clocks.seconds["inner"] >= 0.02 > clocks.seconds["outer"]
        True
        """

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            self._open.append(0.0)
            try:
                return function(*arguments, **named)
            finally:
                took = time.perf_counter() - began
                inside = self._open.pop()
                self.seconds[phase] = self.seconds.get(phase, 0.0) + took - inside
                if self._open:
                    self._open[-1] += took

        return timed

    def take(self) -> dict[str, float]:
        """The seconds since they were last taken."""
        taken, self.seconds = self.seconds, {}
        return taken

    def install(self, phases: dict[str, list[str]]) -> None:
        """Put a clock around every function that is named."""
        for phase, names in phases.items():
            for owner, attribute in map(find, names):
                setattr(owner, attribute, self.around(phase, getattr(owner, attribute)))


def find(name: str) -> tuple[Any, str]:
    """The module or class that holds a function, and the function's name in it.

    >>> find("penstock.runner:Run.new_events")
    (<class 'penstock.runner.Run'>, 'new_events')
    """
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, attribute = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    assert callable(getattr(owner, attribute)), f"{name} cannot be called"
    return owner, attribute


def every_name() -> Iterator[str]:
    """All functions that get a clock."""
    for phases in (DRIVER, TASK):
        for names in phases.values():
            yield from names
