"""`mobius plan` with several values of an option: a row for each combination, and refusals in their rows."""

from __future__ import annotations

import shlex

import pytest

from mobius.commands import plan, run_command
from mobius.config.sources import combinations
from mobius.planner.forecast import forecast

SMALL = shlex.split("--model_path 1b --batch_size 8 --num_ranks 2 --num_stages 4 --num_chunks 4 --resident_stages 0")
"""Nothing is left to choose, which takes the most time."""

Captured = pytest.CaptureFixture[str]


def rows_of(words: str, capsys: Captured, *, code: int = 0) -> list[list[str]]:
    """Cells of the table, heads first."""
    assert plan([*SMALL, *shlex.split(words)]) == code
    output, errors = capsys.readouterr()
    assert errors == ""
    return [line.split() for line in output.splitlines() if line]


def test_the_table_has_a_row_per_combination_with_the_numbers_of_its_plan(capsys: Captured) -> None:
    heads, *rows = rows_of("--card H200 4090 --pcie 3 4", capsys)
    assert heads[:4] == ["card", "pcie", "stages", "chunks"]
    assert [row[:2] for row in rows] == [["H200", "3"], ["H200", "4"], ["4090", "3"], ["4090", "4"]]
    found = forecast([*SMALL, "--card", "4090", "--pcie", "3"])
    assert f"{found.step_seconds:.3f}" in rows[2]
    assert f"{found.tokens_per_second:,.0f}" in rows[2]
    assert float(rows[2][heads.index("s/step")]) > float(rows[3][heads.index("s/step")])


def test_the_host_of_the_gpus_can_be_described(capsys: Captured) -> None:
    def seconds(words: str) -> list[float]:
        heads, *rows = rows_of(f"--card H200 {words}", capsys)
        return [float(row[heads.index("s/step")]) for row in rows]

    slow, usual = seconds("--host_bandwidth 20 190")
    assert slow > usual
    few, many = seconds("--host_cores 1 16")
    assert few >= many


def test_what_cannot_be_planned_or_does_not_fit_is_told_in_its_row(capsys: Captured) -> None:
    _, fp8, int8 = rows_of("--card 3090 --matmul_dtype fp8 int8", capsys)
    assert " ".join(fp8).startswith("fp8 - - - - - - - --matmul_dtype fp8: the card RTX3090 has no fp8 products")
    assert float(int8[3]) > 0
    _, short, _ = rows_of("--card H200 --host_memory_limit 4 400", capsys)
    assert "does not fit" in " ".join(short)
    rows_of("--card H200 --host_memory_limit 4 5", capsys, code=1)


def test_a_wrong_option_is_told_before_anything_is_planned(capsys: Captured) -> None:
    assert run_command("plan", [*SMALL, "--card", "H200", "4090", "--num_stagez", "4"]) == 2
    assert "did you mean `--num_stages`?" in capsys.readouterr().err


def test_each_combination_is_a_command_line_with_one_value_of_each_option() -> None:
    assert [
        words for _, words in combinations(["--card", "a", "b", "--no_offload", "--lr=1", "--dataset", "c", "d"])
    ] == [
        ["--card", "a", "--no_offload", "--lr=1", "--dataset", "c", "d"],  # which takes a list itself
        ["--card", "b", "--no_offload", "--lr=1", "--dataset", "c", "d"],
    ]
    assert combinations(["--card", "a"]) == [({}, ["--card", "a"])]
    assert combinations(["stray", "--card", "a", "b"]) == [({}, ["stray", "--card", "a", "b"])]
