"""Links to durable steps are removed by all ranks at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mobius.checkpoint.durable_steps import _remove_links


def test_a_link_that_another_rank_has_removed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (slot := tmp_path / "slot-1").mkdir()
    links = [tmp_path / f"checkpoint-{step}" for step in (1, 2)]
    for link in links:
        link.symlink_to(slot, target_is_directory=True)
    read = os.readlink

    def read_late(path: Any, **named: Any) -> Any:
        if Path(path).name == "checkpoint-1":
            Path(path).unlink()
        return read(path, **named)

    monkeypatch.setattr(os, "readlink", read_late)
    _remove_links({slot.resolve()}, tmp_path)
    assert not any(map(os.path.lexists, links))
