"""A folder's rate of writing."""

from pathlib import Path

import pytest

from mobius.hardware import disk_rate


def test_a_rate_is_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_rate, "MOST_BYTES", disk_rate.CHUNK_BYTES)
    rates = disk_rate.measure_rates(tmp_path, reads=False)
    assert rates is not None
    assert min(rates) > 1e5
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_has_no_rate(tmp_path: Path) -> None:
    assert disk_rate.measure_rates(tmp_path / "absent") is None
