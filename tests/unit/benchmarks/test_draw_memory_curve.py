"""The picture of speed against memory, from rows as benchmark.py writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from draw_memory_curve import main, points_of


def row(name: str, gib: float | None, rate: float, *, is_mobius: bool = True) -> dict[str, Any]:
    waits = {"weights": 0.0} if is_mobius else None
    measurement = {"reserved_gib": gib, "tokens_per_second": rate, "wait_seconds": waits}
    return {"name": name, "options": "", "hardware": "4 x NVIDIA H200, 64 cores", "measurement": measurement}


ROWS = [
    row("Mobius", 63.0, 50_000.0),
    row("24 GiB", 21.5, 40_000.0),
    row("fsdp2-offload", 10.1, 16_000.0, is_mobius=False),
    {"name": "deepspeed-zero2", "hardware": "4 x NVIDIA H200", "measurement": None},
]


def test_points_are_the_measured_rows_by_memory() -> None:
    points = points_of(ROWS)
    assert [(point.name, point.is_mobius) for point in points] == [
        ("fsdp2-offload", False),
        ("24 GiB", True),
        ("no limit", True),
    ]
    assert [point.gib for point in points] == [10.1, 21.5, 63.0]


def test_a_picture_is_drawn_and_its_numbers_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "new" / "curve.png"
    rows.write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    assert main([str(rows), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "21.50 GiB     40,000 tokens/s  24 GiB" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}\n", "no JSON\n", json.dumps(row("one", 3.0, 1.0)) + "\n"])
def test_rows_that_make_no_curve_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text)
    assert main([str(rows), "--output", str(tmp_path / "curve.png")]) == 2
    assert "error" in capsys.readouterr().err
    assert not (tmp_path / "curve.png").exists()
