"""Wear and space of disks: arithmetic by hand, and refusals that say what to change."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.plan_requests import find_published_shape, request_of

from mobius.config.config import Dtype, DurableSteps, OptimizerStates
from mobius.errors import PlanError, StateFileError
from mobius.planner.disk_use import DiskUse, check_disks, with_room_for_steps
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.request import Machine
from mobius.planner.solver import Effort, PlanResult, solve

SHAPE = find_published_shape("7b")
CARD = GPU_SPECS["RTX4090"]
BYTES = 10 * SHAPE.num_parameters
"""Written per step: two bytes of the master and eight of moments, of stages that are all streamed."""


def planned(machine: Machine | None = None, **options: Any) -> PlanResult:
    usual: dict[str, Any] = {"resident_stages": "0", "dtype": Dtype.BF16, "num_iterations": 6000}
    usual |= {"durable_steps": DurableSteps.OFF, "num_stages": 12}  # no more stages of a GPU than buffers
    request = request_of(SHAPE, machine or Machine(4, CARD), **usual | {"offload_states_to": "/a,/b"} | options)
    return solve(request, layer=estimated_layer, effort=Effort.NUMBERS)


def use_of(**options: Any) -> DiskUse:
    use = DiskUse.of(planned(**options))
    assert use is not None
    return use


def refusal(**options: Any) -> str:
    with pytest.raises(StateFileError) as caught:
        check_disks(planned(**options), is_here=False)
    return str(caught.value)


def test_a_run_writes_its_steps_times_its_states() -> None:
    use = use_of()
    assert use.num_bytes == pytest.approx(BYTES, rel=0.001)
    assert use.written(6000) == pytest.approx(6000 * BYTES / 1e12, rel=0.001)
    assert "(31.4 GiB in each): 1,000 steps write 67.4 TB, the run's 6,000 steps 404 TB" in use.describe()
    check_disks(planned(), is_here=False)


def test_a_run_that_would_write_too_much_may_leave_durable_steps_out() -> None:
    text = refusal(durable_steps=DurableSteps.ON, max_disk_writes=450)
    assert "the run would write 485 TB (6,000 steps x 80.9 GB)" in text
    assert "\n  --durable_steps off: 404 TB" in text


def test_gradients_need_not_be_on_the_disks() -> None:
    text = refusal(gradients_on_disks=True, max_grad_norm=1.0, max_disk_writes=450)
    assert "the run would write 485 TB" in text
    assert "\n  without --gradients_on_disks, with 2 more bytes of host memory per parameter: 404 TB" in text


def test_weights_need_not_be_on_the_disks_unless_steps_are_durable_there() -> None:
    text = refusal(weights_on_disks=True, max_disk_writes=450)
    assert "the run would write 485 TB" in text
    assert "\n  without --weights_on_disks, with 2 more bytes of host memory per parameter: 404 TB" in text
    assert "left out" not in refusal(weights_on_disks=True, max_disk_writes=450, durable_steps=DurableSteps.ON)


def test_steps_are_durable_where_two_of_them_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    need, machine = 24 * SHAPE.num_parameters, Machine(4)
    config = planned(durable_steps=DurableSteps.AUTO, offload_states_to=f"{tmp_path}/a,{tmp_path}/b").request.config

    def may(free: float, *, is_possible: bool = True, smallest: int = 1) -> bool:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free)))
        agree = lambda own: min(own, smallest)  # noqa: E731
        return with_room_for_steps(machine, config, SHAPE, is_possible=is_possible, agree=agree).may_keep_steps

    assert may(1.001 * need)
    assert not may(0.999 * need), "both folders are on one disk"
    assert not may(2 * need, is_possible=False)
    assert not may(2 * need, smallest=0), "another rank has no room"
    earlier = tmp_path / "a" / config.slots_name / "slot-0"
    earlier.mkdir(parents=True)
    with (earlier / "states-0.raw").open("w") as file:
        file.truncate(need)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert may(0.5 * need), "what the start before has there is given back"


def test_models_whose_experts_are_stored_in_another_order_have_no_durable_steps() -> None:
    config = planned(durable_steps=DurableSteps.ON).request.config
    with pytest.raises(PlanError, match="--durable_steps on: .* Use off"):
        with_room_for_steps(Machine(4), config, SHAPE, is_possible=False)


def test_each_node_has_the_states_of_its_own_pipelines() -> None:
    two_nodes = Machine(2, CARD, num_replicas=4, num_nodes=2)
    assert use_of(machine=two_nodes).num_bytes == pytest.approx(BYTES / 2, rel=0.001)


def test_steps_that_follow_from_data_are_not_guessed() -> None:
    use = use_of(num_iterations=None, num_train_epochs=3.0, max_disk_writes=0.1)
    assert use.describe().endswith("1,000 steps write 67.4 TB")
    check_disks(planned(num_iterations=None, num_train_epochs=3.0, max_disk_writes=0.1), is_here=False)


def test_no_states_on_disks_wear_none() -> None:
    assert DiskUse.of(planned(offload_states_to=None)) is None
    assert DiskUse.of(planned(machine=Machine(4, GPU_SPECS["H200"]), resident_stages="all")) is None


def check_space(use: DiskUse, monkeypatch: pytest.MonkeyPatch, *, free: int) -> None:
    """With both folders on one disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    use.check_space()


def test_folders_have_the_parts_that_their_drives_write_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(4, CARD, disk_shares=(0.75, 0.25))
    use = use_of(machine=machine, disk_endurance="600", max_disk_writes=9999.0)
    assert "(47.1 GiB, 15.7 GiB)" in use.describe()
    assert "51 % of the rating of the drive that wears out first" in use.describe()
    with pytest.raises(StateFileError, match="62.8 GiB of optimizer states would be on its file system, 50.0 GiB"):
        check_space(use, monkeypatch, free=50 * 2**30)
    check_space(use, monkeypatch, free=63 * 2**30)


@pytest.mark.parametrize(("ratings", "share"), [("600", "34"), ("600,600", "34"), ("1200,300", "67")])
def test_the_first_drive_to_wear_out_counts(ratings: str, share: str) -> None:
    text = use_of(disk_endurance=ratings, max_disk_writes=9999.0).describe()
    assert f"{share} % of the rating of the drive that wears out first" in text


def test_half_of_the_rating_is_allowed_unless_more_is() -> None:
    check_disks(planned(disk_endurance="405"), is_here=False)
    text, few = refusal(disk_endurance="402"), 2 * 32000 * 4096  # embedding and head keep ten bytes
    compact = 3.0625 * (SHAPE.num_parameters - few) + 10 * few
    assert "would write 404 TB (6,000 steps x 67.4 GB), 402 TB may be written (half of the rating of 2 drive(s)" in text
    assert f"--optimizer_states compact: {6000 * compact / 1e12:.0f} TB" in text
    steps = int(402e12 / BYTES)
    assert f"--num_iterations {steps};" in text
    assert "more drives like these: 3 in place of 2" in text
    assert text.endswith("--max_disk_writes 405")
    check_disks(planned(disk_endurance="402", max_disk_writes=405.0), is_here=False)
    check_disks(planned(disk_endurance="402", num_iterations=steps), is_here=False)
    check_disks(planned(disk_endurance="402", offload_states_to="/a,/b,/c"), is_here=False)


def test_a_limit_that_is_given_holds_without_a_rating() -> None:
    text = refusal(max_disk_writes=100.0, optimizer_states=OptimizerStates.COMPACT)
    assert "135 TB (6,000 steps x 22.5 GB), 100 TB may be written (--max_disk_writes 100)" in text
    assert "--optimizer_states" not in text, "nothing is smaller"
    assert "drives" not in text, "more of them would write as much"


@pytest.mark.parametrize(("folders", "gib", "fits"), [("a", 62.5, False), ("a", 63, True), ("a,b", 62.5, False)])
def test_file_systems_without_room_are_refused_here_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: str, gib: float, fits: bool
) -> None:
    """62.8 GiB are needed; two folders that share a file system share what is free there."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(gib * 2**30)))
    found = planned(offload_states_to=",".join(str(tmp_path / name / "new") for name in folders.split(",")))
    check_disks(found, is_here=False)
    text = r"62\.8 GiB of optimizer states would be on its file system, 62\.5 GiB is free"
    refused = pytest.raises(StateFileError, match=text)
    with nullcontext() if fits else refused:
        check_disks(found, is_here=True)
