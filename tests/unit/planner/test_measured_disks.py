"""Rates of disks: measured over all ranks, sustained once a cache is full, and used by the next plan."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.local_transport import LocalTransport, run_rank_threads, together
from harness.plan_requests import find_published_shape, request_of

from mobius.config.config import Dtype, DurableSteps
from mobius.distributed.rendezvous import Rendezvous
from mobius.distributed.transport import SingleRankTransport
from mobius.hardware.disk_traffic import BusySpan, Traffic
from mobius.planner import measured_disks, this_machine
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.measured_disks import keep_rates, known_disks, try_disks
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.plan_table import describe_disks
from mobius.planner.profile import DiskRates
from mobius.planner.rates import profile_for
from mobius.planner.request import Machine
from mobius.planner.solver import Effort, solve
from mobius.process.ranks import Ranks

GIB = 2**30
ALONE = Ranks(0, 1, 0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextmanager
def free_space(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=num_bytes))
        yield


def moved(*spans: tuple[float, float, int]) -> Traffic:
    """Requests that were under way from one second to another."""
    traffic = Traffic()
    traffic.spans.extend(BusySpan(*span) for span in spans)
    traffic.num_bytes = sum(span[2] for span in spans)
    return traffic


def kept(folders: list[str], reads: list[Traffic], writes: list[Traffic], since: float = 0.5) -> list[DiskRates]:
    found = keep_rates(folders, (reads, writes), since=since, ranks=ALONE, all_ranks=SingleRankTransport())
    return [*found.values()]


def test_writes_count_from_the_moment_in_which_the_cache_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine of 27 GiB that are free may be the cache: eight gibibytes are fast, then one a second."""
    folder, reads = str(tmp_path), [moved((1, 2, 4 * GIB), (30, 34, 8 * GIB))]
    writes = moved((1, 2, 4 * GIB), (3, 4, 4 * GIB), (20, 22, 2 * GIB), (24, 26, 2 * GIB))
    with free_space(monkeypatch, 27 * GIB):
        assert kept([folder], reads, [writes]) == [DiskRates(2 * GIB, 1 * GIB)]
    assert known_disks([folder])[0] == DiskRates(2 * GIB, 1 * GIB, at_once=3 * GIB)
    with free_space(monkeypatch, 300 * GIB):
        (burst,) = kept([folder], reads, [writes])
    assert burst == DiskRates(2 * GIB, 8 * GIB / 5, is_burst=True, at_once=8 * GIB)
    assert known_disks([folder])[0] == DiskRates(2 * GIB, 1 * GIB, at_once=3 * GIB), (
        "a burst does not replace what is sustained"
    )


def test_what_was_moved_before_the_first_step_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = (1.0, 2.0, 8 * GIB), (10.0, 12.0, 2 * GIB)
    with free_space(monkeypatch, 3000 * GIB):
        (rates,) = kept([str(tmp_path)], [moved(*spans)], [moved(*spans)], since=5)
    assert rates == DiskRates(GIB, GIB, is_burst=True, at_once=2 * GIB)


def test_little_tells_nothing_and_a_rank_without_streamed_stages_takes_part(tmp_path: Path) -> None:
    little = moved((1, 2, GIB // 2))
    assert kept([str(tmp_path)], [little], [little]) == []
    assert kept([str(tmp_path)], [], []) == []
    assert known_disks([str(tmp_path)]) == (None, ())
    assert known_disks([]) == (None, ())


def test_drives_share_the_bytes_by_what_they_write_and_one_without_a_rate_makes_all_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = moved((1, 2, 4 * GIB)), moved((1, 2, 2 * GIB))
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    with free_space(monkeypatch, 3 * GIB):
        kept([first, second], [fast, slow], [slow, fast])
    assert known_disks([first, second])[1] == pytest.approx((1 / 3, 2 / 3))
    # All is written at once; the second reads its two thirds at 2 GiB per second, and moves 6 both ways.
    assert known_disks([first, second])[0] == DiskRates(3 * GIB, 6 * GIB, is_burst=True, at_once=9 * GIB)
    assert known_disks([first, str(tmp_path / "c")]) == (None, ())


def test_ranks_share_a_disk_and_nodes_have_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 move two gibibytes each, from 1 to 3 and 2 to 4 s: 4 in 3 s; the other node is twice as fast."""

    def work(transport: LocalTransport) -> DiskRates:
        node, local = divmod(transport.rank, 2)
        begin, size = 1.0 + local, (2 + 2 * node) * GIB
        own = [moved((begin, begin + 2, size))] if transport.rank != 3 else []
        ranks = Ranks(transport.rank, 4, local, num_replicas=2, num_nodes=2)
        (rates,) = keep_rates([str(tmp_path)], (own, own), since=0.5, ranks=ranks, all_ranks=transport).values()
        return rates

    with free_space(monkeypatch, 3 * GIB):
        first, second, third, _ = run_rank_threads(4, work)
    assert first == second
    assert first.write == pytest.approx(4 * GIB / 3)
    assert third.write == pytest.approx(2 * GIB), "its other rank streams nothing"


def test_reads_beside_writes_are_told_apart_from_reads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads at 2 GiB/s alone and 1 beside writes, which come to 1.5 alone and 0.5 then."""
    reads, writes = moved((1, 2, 2 * GIB), (2, 6, 4 * GIB)), moved((2, 6, 2 * GIB), (6, 8, 3 * GIB))
    with free_space(monkeypatch, 300 * GIB):
        (rates,) = kept([str(tmp_path)], [reads], [writes])
    assert astuple(rates) == pytest.approx((2 * GIB, 1.5 * GIB, True, 1.5 * GIB))


def test_a_folder_that_no_run_has_used_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_disks, "LEAST_BYTES", 2**25)
    monkeypatch.setattr(measured_disks, "TRIAL_BYTES", 5 * 2**23)
    folders = [str(tmp_path / "a" / "deep"), str(tmp_path)]
    try_disks(folders)
    found, shares = known_disks(folders)
    assert found is not None
    assert found.is_burst
    assert sum(shares) == pytest.approx(1)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    monkeypatch.setattr(measured_disks, "StateFiles", None)
    try_disks(folders)
    try_disks([])
    assert known_disks(folders) == (found, shares)


def test_a_folder_that_cannot_be_used_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_disks, "TRIAL_BYTES", 2**23)
    try_disks(["/proc/none"])
    assert known_disks(["/proc/none"]) == (None, ())


def test_a_broken_file_is_told_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = measured_disks._file()
    path.parent.mkdir(parents=True)
    path.write_text('{"/a": {"read": 1, "write": 0, "is_burst": false}}')
    assert known_disks(["/a"]) == (None, ())
    assert "rates of disks cannot be read" in caplog.text


def test_the_next_plan_uses_them_unless_a_rate_is_given() -> None:
    machine = Machine(4, GPU_SPECS["RTX4090"], disks=DiskRates(14e9, 4e9, is_burst=True))
    options: dict[str, Any] = {"resident_stages": "0", "dtype": Dtype.BF16, "offload_states_to": "/a,/b"}
    options |= {"durable_steps": DurableSteps.OFF, "num_stages": 12}
    shape = find_published_shape("7b")
    found = solve(request_of(shape, machine, **options), layer=estimated_layer, effort=Effort.NUMBERS)
    text = "reads them in 4.81 s and writes them in 16.85 s as measured here, in a burst"
    assert text in describe_disks(found)
    given = profile_for(request_of(shape, machine, **options, disk_rate="1,0.5"), None)
    assert given is not None
    assert given.disks == DiskRates(2e9, 1e9)
    given = profile_for(request_of(shape, machine, **options, disk_rate="1,0.5,1.25"), None)
    assert given is not None
    assert given.disks == DiskRates(2e9, 1e9, at_once=2.5e9)
    shared = profile_for(request_of(shape, replace(machine, num_replicas=2), **options), None)
    assert shared is not None
    assert shared.disks == DiskRates(7e9, 2e9, is_burst=True)


def test_ranks_plan_with_what_the_slowest_nodes_disks_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second node's were never tried to the end: nothing is known of the run's disks then."""
    known = {1: DiskRates(2e9, 1e9, at_once=2.5e9), 2: DiskRates(3e9, 0.5e9, is_burst=True), 3: None}

    def machine_of(rank: int, met: Rendezvous) -> Machine:
        return this_machine._with_disks(Machine(1), ["/a"], met)

    for node, expected in (
        (2, DiskRates(2e9, 0.5e9, is_burst=True, at_once=2.5e9)),
        (3, None),
    ):
        both = iter([(known[1], (1.0,)), (known[node], (1.0,))])
        monkeypatch.setattr(this_machine, "known_disks", lambda _, both=both: next(both))
        for machine in together(machine_of, num_ranks=2):
            assert isinstance(machine, Machine)
            assert machine.disks == expected
            assert machine.disk_shares == (1.0,)
