"""Work that hangs, fails or crashes has a Problem, and all other work its result."""

import os
import signal
import time

from mobius.doctor.apart import Problem, run_apart
from mobius.errors import PlanError


def fail() -> None:
    raise ValueError("half of it\nand more")


def refuse() -> None:
    raise PlanError("does not fit")


def test_each_work_has_its_own_end() -> None:
    ticks: list[int] = []
    begun = time.monotonic()
    works = {
        "hangs": lambda: time.sleep(60),
        "fails": fail,
        "is refused": refuse,
        "crashes": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "prints and returns": lambda: print("noise") or {"a": (1, 2)},
        "is large": lambda: "x" * 10**6,
    }
    results = run_apart(works, end=begun + 4, most_at_once=3, tick=lambda: ticks.append(1))
    assert time.monotonic() - begun < 10
    assert results == {
        "hangs": Problem("it was not done in time", is_late=True),
        "fails": Problem("ValueError: half of it"),
        "is refused": Problem("does not fit"),
        "crashes": Problem("its process crashed"),
        "prints and returns": {"a": (1, 2)},
        "is large": "x" * 10**6,
    }
    assert len(ticks) == len(works)


def test_no_more_run_at_once_than_asked_for() -> None:
    works = {str(number): time.monotonic for number in range(3)} | {"slow": lambda: time.sleep(0.2) or time.monotonic()}
    results = run_apart({"slow": works.pop("slow"), **works}, end=time.monotonic() + 20, most_at_once=1)
    times = list(map(float, results.values()))  # type: ignore[arg-type]
    assert times == sorted(times)


def test_a_work_with_an_end_of_its_own_outlives_the_others() -> None:
    begun = time.monotonic()
    works = {"rows": lambda: time.sleep(1) or "planned", "disk": lambda: time.sleep(60)}
    results = run_apart(works, end=begun + 0.3, most_at_once=2, ends={"rows": begun + 30})
    assert results == {"rows": "planned", "disk": Problem("it was not done in time", is_late=True)}


def test_work_after_the_end_is_late() -> None:
    results = run_apart({"a": lambda: time.sleep(5), "b": lambda: time.sleep(5)}, end=0.0, most_at_once=1)
    assert [*results.values()] == [Problem("it was not done in time", is_late=True)] * 2
