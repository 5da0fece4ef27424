"""All ranks get the order that the first one found, and a list that is an order of the user's is known as one."""

from __future__ import annotations

import logging

import pytest
from harness.local_transport import together
from harness.plan_requests import TWO_PER_ROOT_COMPLEX
from torch.distributed import HashStore

from mobius.config.config import Config, config_from
from mobius.distributed import device_order
from mobius.distributed.device_order import is_given_order, order_devices
from mobius.distributed.rendezvous import Rendezvous
from mobius.hardware.topology import Gpu

BOX = TWO_PER_ROOT_COMPLEX
CONFIG = config_from({"num_chunks": 4})


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")


def chosen(config: Config = CONFIG) -> list[tuple[int, ...]]:
    """What each of four ranks is told."""
    return together(lambda _, seat: order_devices(config, 4, seat), 4)  # type: ignore[return-value]


def see(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], listed: str | None) -> list[int]:
    """Make ranks see these GPUs, listed in CUDA_VISIBLE_DEVICES like that; the numbers of GPUs that are asked for."""
    asked: list[int] = []

    def survey(num_gpus: int) -> list[Gpu]:
        asked.append(num_gpus)
        return gpus

    monkeypatch.setattr(device_order, "read_topology", survey)
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    return asked


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="mobius.distributed.device_order")
    return caplog


@pytest.mark.parametrize(("listed", "shown"), [(None, "0,2,1,3"), ("4,5,6,7", "4,6,5,7"), ("0,1,2,3,4", "0,2,1,3")])
def test_every_rank_gets_the_order_of_the_first_which_alone_looks_and_tells(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, listed: str | None, shown: str
) -> None:
    asked = see(monkeypatch, BOX, listed)

    assert chosen() == [(0, 2, 1, 3)] * 4
    assert asked == [4]
    assert log.messages == [f"devices in the order {shown}: neighbouring ranks load over different root complexes"]


def test_an_order_of_the_user_s_stays_and_a_better_one_is_named_by_the_user_s_numbers(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, BOX, "3,2,1,0")

    assert chosen() == [(0, 1, 2, 3)] * 4

    (line,) = log.messages
    assert line.startswith("devices in the given order 3,2,1,0; 3,1,2,0 is better: ")


@pytest.mark.parametrize(
    ("listed", "addresses", "expected"),
    [
        (None, "abc", False),
        ("", "abc", False),
        ("0,1,2", "abc", False),
        ("4, 5, 7", "abc", False),
        ("9,10,11", "abc", False),  # as numbers, not as texts
        ("0,2,1", "abc", True),
        ("0,1,2,9,3", "abc", False),  # only the devices of the ranks count
        ("GPU-5f,GPU-11,GPU-80", "abc", False),
        ("GPU-5f,GPU-11,GPU-80", "acb", True),
    ],
)
def test_a_list_is_an_order_where_it_does_not_ascend(listed: str | None, addresses: str, expected: bool) -> None:
    gpus = [Gpu(index, address=f"0000:{letter}0:00.0") for index, letter in enumerate(addresses)]

    assert is_given_order(listed, gpus) is expected


@pytest.mark.parametrize(("config", "num_ranks"), [(config_from({"cross_mapping": False}), 4), (Config(), 2)])
def test_nobody_looks_at_the_machine_where_the_order_is_not_to_be_chosen(
    monkeypatch: pytest.MonkeyPatch, config: Config, num_ranks: int
) -> None:
    monkeypatch.setattr(device_order, "read_topology", None)
    rendezvous = Rendezvous(HashStore(), rank=0, num_ranks=num_ranks)

    assert order_devices(config, num_ranks, rendezvous) == tuple(range(num_ranks))
