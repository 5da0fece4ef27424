"""Loads that share a link are found by their times, and what was measured is kept for these GPUs and no others."""

from __future__ import annotations

import json
import logging
import random
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from mobius.machine import load_probe
from mobius.machine.cross_mapping import best_order
from mobius.machine.load_probe import Slowdowns, measure_in_subprocess, measure_slowdowns
from mobius.machine.topology import Topology

FLAT = Topology.from_json((Path(__file__).parents[1] / "machine/topologies/flat_virtual_machine.json").read_text())
HIDDEN = {(0, 2), (1, 3)}
"""The pairs of the flat machine that share a link in truth."""


class Machine:
    """GPUs behind uplinks: loads through one uplink at once share its speed equally, up to each GPU's own."""

    def __init__(
        self, uplinks: Sequence[str], *, noise: float = 0.0, own_speeds: Sequence[float] | None = None
    ) -> None:
        self._uplinks, self._noise = uplinks, noise
        self._own_speeds = own_speeds or [25.0] * len(uplinks)
        self._numbers = random.Random(3)
        self.num_calls = 0

    def time(self, gpus: Sequence[int]) -> list[float]:
        self.num_calls += 1
        seconds = []
        for gpu in gpus:
            sharers = sum(self._uplinks[other] == self._uplinks[gpu] for other in gpus)
            speed = min(self._own_speeds[gpu], 25.0 / sharers)
            seconds.append(0.128 / speed * (1 + self._noise * self._numbers.random()))
        return seconds


def test_gpus_behind_one_uplink_are_found_and_parted() -> None:
    slowdowns = measure_slowdowns(4, Machine("abab", noise=0.08).time)

    for pair, slowdown in slowdowns.items():
        assert slowdown == pytest.approx(2.0 if pair in HIDDEN else 1.0, rel=0.09)
    order = best_order(FLAT.with_slowdowns(slowdowns), num_microbatches=4)
    assert all((order[rank] % 2) != (order[(rank + 1) % 4] % 2) for rank in range(4))


def test_a_gpu_that_its_own_slot_slows_down_more_than_the_uplink_shares_nothing() -> None:
    assert measure_slowdowns(2, Machine("aa", own_speeds=[12.0, 12.0]).time) == {(0, 1): 1.0}


def test_the_gpu_of_a_pair_that_suffers_more_counts() -> None:
    """A card in a slow slot takes little of the uplink from itself, but much from its neighbour."""
    assert measure_slowdowns(2, Machine("aa", own_speeds=[25.0, 12.5]).time) == {(0, 1): 2.0}


def test_one_slow_run_of_several_does_not_count() -> None:
    machine = Machine("ab")
    hiccups = iter([9.0, *[1.0] * 100])

    slowdowns = measure_slowdowns(2, lambda gpus: [next(hiccups) * seconds for seconds in machine.time(gpus)])

    assert slowdowns == {(0, 1): 1.0}


def test_eight_gpus_take_a_measurement_each_and_one_per_pair() -> None:
    machine = Machine("abcdefgh")

    assert len(measure_slowdowns(8, machine.time)) == 28
    assert machine.num_calls == (8 + 28) * load_probe.NUM_LOADS


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="mobius.machine.load_probe")
    return caplog


def add_measured_slowdowns(topology: Topology, folder: Path, measure: Callable[[int], Slowdowns]) -> Topology:
    """What `load_probe` makes of the topology where `folder` keeps measurements and `measure` measures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_probe, "cache_folder", lambda: folder)
        patch.setattr(load_probe, "measure_in_subprocess", measure)
        return load_probe.add_measured_slowdowns(topology)


def measured(num_gpus: int) -> Slowdowns:
    return {pair: 1.9 if pair in HIDDEN else 1.0 for pair in combinations(range(num_gpus), 2)}


def must_not(num_gpus: int) -> Slowdowns:
    raise AssertionError("measured although the result was kept")


def test_a_measurement_is_kept_and_used_again(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    first = add_measured_slowdowns(FLAT, tmp_path / "cache", measured)
    second = add_measured_slowdowns(FLAT, tmp_path / "cache", must_not)

    assert first == second
    assert first.link(0, 2).slowdown == 1.9
    assert log.messages[0] == "shared links measured: at most x1.90, GPU 0 beside GPU 2"
    assert log.messages[1].startswith("shared links as measured before")


def test_a_kept_measurement_goes_by_the_gpus_and_not_by_their_numbers(tmp_path: Path) -> None:
    add_measured_slowdowns(FLAT, tmp_path, measured)
    gpus = [replace(FLAT.gpus[index], index=place) for place, index in enumerate((3, 1, 2, 0))]

    again = add_measured_slowdowns(replace(FLAT, gpus=tuple(gpus)), tmp_path, must_not)

    assert [(link.first, link.second) for link in again.links if link.slowdown == 1.9] == [(0, 1), (2, 3)]


def test_other_gpus_are_measured_anew(tmp_path: Path) -> None:
    add_measured_slowdowns(FLAT, tmp_path, lambda _: dict.fromkeys(combinations(range(4), 2), 1.5))
    moved = replace(FLAT, gpus=(*FLAT.gpus[:3], replace(FLAT.gpus[3], address="0000:99:00.0")))

    assert add_measured_slowdowns(moved, tmp_path, measured).link(0, 1).slowdown == 1.0
    assert len(list(tmp_path.iterdir())) == 2


def test_gpus_that_cannot_be_told_from_others_are_measured_every_time(tmp_path: Path) -> None:
    nameless = replace(FLAT, gpus=tuple(replace(gpu, uuid=None) for gpu in FLAT.gpus))

    assert add_measured_slowdowns(nameless, tmp_path, measured).is_measured
    assert list(tmp_path.iterdir()) == []


def spoil_nothing(text: str) -> str:
    return text[: len(text) // 2]


def spoil_pair(text: str) -> str:
    record = json.loads(text)
    return json.dumps({**record, "links": record["links"][1:]})


def spoil_number(text: str) -> str:
    record = json.loads(text)
    record["links"][2]["slowdown"] = "fast"
    return json.dumps(record)


def spoil_measurement(text: str) -> str:
    return (
        Topology.from_json(text)
        .with_slowdowns(dict.fromkeys(combinations(range(4), 2), 1.0))
        .to_json()
        .replace("1.0", "null")
    )


def spoil_names(text: str) -> str:
    return text.replace("GPU-", "GPU-0")


def spoil_format(text: str) -> str:
    return json.dumps({"version": 1, "slowdowns": []})


@pytest.mark.parametrize(
    "spoil", [spoil_nothing, spoil_format, spoil_pair, spoil_number, spoil_measurement, spoil_names, lambda _: "[]"]
)
def test_a_spoilt_file_is_measured_over(
    tmp_path: Path, log: pytest.LogCaptureFixture, spoil: Callable[[str], str]
) -> None:
    add_measured_slowdowns(FLAT, tmp_path, must_differ)
    (file,) = tmp_path.iterdir()
    file.write_text(spoil(file.read_text()))

    assert add_measured_slowdowns(FLAT, tmp_path, measured).link(0, 2).slowdown == 1.9
    assert add_measured_slowdowns(FLAT, tmp_path, must_not).link(0, 2).slowdown == 1.9
    assert any("cannot be read: shared links are measured again" in message for message in log.messages)


def must_differ(num_gpus: int) -> Slowdowns:
    return dict.fromkeys(combinations(range(num_gpus), 2), 3.0)


@pytest.mark.parametrize(
    "error",
    [
        OSError("no such program"),
        ValueError("Traceback\nRuntimeError: CUDA out of memory"),
        subprocess.TimeoutExpired("probe", 180),
        KeyError((0, 3)),
    ],
)
def test_a_measurement_that_fails_leaves_what_the_machine_tells(
    tmp_path: Path, log: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(num_gpus: int) -> Slowdowns:
        raise error

    assert add_measured_slowdowns(FLAT, tmp_path, fail) == FLAT
    (message,) = log.messages
    assert message.startswith("--probe_topology: shared links could not be measured: ")
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("slowdown", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_measurement_that_is_no_slowdown_leaves_what_the_machine_tells(tmp_path: Path, slowdown: float) -> None:
    wrong = dict.fromkeys(combinations(range(4), 2), slowdown)

    assert add_measured_slowdowns(FLAT, tmp_path, lambda _: wrong) == FLAT
    assert list(tmp_path.iterdir()) == []


def test_a_single_gpu_has_nothing_to_measure(tmp_path: Path) -> None:
    single = Topology(FLAT.gpus[:1], ())

    assert add_measured_slowdowns(single, tmp_path, must_not) == single


def test_a_folder_that_cannot_be_written_keeps_nothing_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert add_measured_slowdowns(FLAT, tmp_path / "file", measured).is_measured


def process_that(returns: int, stdout: str, stderr: str = "") -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *_, **__: subprocess.CompletedProcess([], returns, stdout, stderr)


def test_the_measuring_process_tells_pairs_in_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", process_that(0, "a library talks\n[[0, 1, 1.5]]\n"))

    assert measure_in_subprocess(2) == {(0, 1): 1.5}


@pytest.mark.parametrize(
    ("returns", "stdout", "reason"),
    [
        (1, "", "no CUDA"),
        (0, "", "Expecting value"),
        (0, "[[0, 1]]", "not enough values"),
    ],
)
def test_a_measuring_process_that_comes_to_nothing_is_a_value_error(
    monkeypatch: pytest.MonkeyPatch, returns: int, stdout: str, reason: str
) -> None:
    monkeypatch.setattr(subprocess, "run", process_that(returns, stdout, "no CUDA"))

    with pytest.raises(ValueError, match=reason):
        measure_in_subprocess(2)
