"""Everything that the page says has its words in English and Chinese, also what the planner and a run call by name."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from mobius.config.cli import parse_args
from mobius.errors import MobiusError
from mobius.planner.forecast import forecast
from mobius.planner.memory_estimates import GpuMemoryEstimate
from mobius.planner.step_prediction import Resource
from mobius.planner.training_command import BLANKS
from mobius.schedule.lanes import Lane, WaitCause

PAGE = Path(__file__).resolve().parents[3] / "mobius" / "board" / "page"
TEXT = (PAGE / "words.js").read_text(encoding="utf-8")
STRING = r'"((?:[^"\\]|\\.)*)"'
WORDS = {
    name or quoted: (english, chinese)
    for name, quoted, english, chinese in re.findall(
        rf"^  (?:(\w+)|{STRING}): \[{STRING},\s+{STRING}\],$", TEXT.partition("export const REFUSALS")[0], re.MULTILINE
    )
}
REFUSALS = re.findall(r'^  \[/(.*)/, "(.*)"\],$', TEXT, re.MULTILINE)
PLAN = shlex.split("--model_path 3b --card RTX4090 --num_ranks 2 --num_stages 8 --num_chunks 4 --batch_size 8")


def test_each_word_is_in_both_languages_with_the_same_blanks() -> None:
    assert len(WORDS) == TEXT.partition("export const REFUSALS")[0].count(": [")
    for key, (english, chinese) in WORDS.items():
        assert english, key
        assert re.search("[一-鿿，：]", chinese) or key == "lora", key
        assert set(re.findall(r"\{\d\}", english)) == set(re.findall(r"\{\d\}", chinese)), key


def test_each_word_that_the_page_asks_for_is_there() -> None:
    pages = [path.read_text(encoding="utf-8") for path in PAGE.glob("*.*") if "uplot" not in path.name]
    asked = {key for text in pages for key in re.findall(r'\bt\("(\w+)"|data-t(?:-label)?="(\w+)"', text)}
    names = {name for pair in asked for name in pair if name}
    assert len(names) > 80
    assert names <= WORDS.keys()
    form = (PAGE / "plan.js").read_text(encoding="utf-8")
    rows = form.partition("const FIELDS")[2].partition("const FIRST")[0]
    own = re.findall(r'\["(\w+)", "\w+", "\w*"\]', rows) + re.findall(r'field\("(\w+)"', form)
    assert len(own) >= 15
    assert {f"plan_{name}" for name in own} <= WORDS.keys()


def test_what_the_planner_calls_by_name_has_words() -> None:
    owners = {each.name.replace("_", " ") for each in fields(GpuMemoryEstimate)} - {"rank"}
    lanes = {f"lane_{lane.value}" for lane in Lane if lane is not Lane.STEP}
    blanks = {f"blank_{blank}" for blank in BLANKS}
    assert owners | lanes | blanks | {*map(str, Resource), *map(str, WaitCause)} <= WORDS.keys()
    assert f"BLANKS = {list(BLANKS)}".replace("'", '"') in (PAGE / "plan.js").read_text(encoding="utf-8")
    for more in ([], ["--offload_states_to", "FOLDER", "--activation_offloading", "on"]):
        assert forecast([*PLAN, *more]).to_json()["host_memory"]["parts"].keys() <= WORDS.keys()


def test_what_a_remedy_brings_has_words() -> None:
    remedies = forecast([*PLAN, "--seq_length", "512", "--host_memory_limit", "20"]).remedies
    assert remedies
    for part in ", ".join(remedies.values()).split(", "):
        assert re.sub(r"^(?:about )?[\d.,]+(?: \w?i?B)? ", "", part) in WORDS


def refusal_of(words: list[str]) -> MobiusError | None:
    """The error for which there is no plan, or the first reason why it does not fit."""
    try:
        parse_args(["--dry_run", *words])
        return next(iter(forecast(words, is_draft=True).refusals), None)
    except MobiusError as error:
        return error


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ("--gpu_memory_limit 1", {"1.0"}),
        ("--host_memory_limit 20", {"20.0"}),
        ("--num_ranks 3", {"8", "3"}),
        ("--batch_size 30 --num_chunks 4", {"30", "4"}),
        ("--batch_size 0", {"batch_size", "0", "at least 1"}),
        ("--batchsize 3", {"batch_size"}),
        ("--matmul_dtype fp8 --card A10", {"A10", "fp8"}),
        ("--offload_states_to FOLDER --max_disk_writes 1 --num_iterations 1000", {"1 TB", "1.0 TB"}),
    ],
)
def test_refusals_are_told_in_chinese_with_their_numbers(options: str, numbers: set[str]) -> None:
    problem = str(refusal_of([*PLAN, "--seq_length", "512", *shlex.split(options)]))
    found = [match.groups() for pattern, _ in REFUSALS if (match := re.search(pattern, problem))]
    assert found, problem
    text = " ".join(" ".join(groups) for groups in found)
    assert any(number in text for number in numbers), text


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ("--num_ranks 3", ["--num_stages 6", "--num_stages 9"]),
        (
            "--batch_size 30 --num_chunks 4",
            ["--num_chunks 3", "--num_chunks 5", "--batch_size 28", "--batch_size 32"],
        ),
        ("--matmul_dtype fp8 --card A10", ["--matmul_dtype bf16", "--matmul_dtype int8"]),
        ("--num_slices 2 --recompute none", ["--recompute auto"]),
        ("--num_stages 64", ["--num_stages 30"]),
        ("--model_path nothing/like-it", []),
    ],
)
def test_what_a_refusal_advises_can_be_chosen(options: str, advice: list[str]) -> None:
    words = [*PLAN, *shlex.split(options)]
    refusal = refusal_of(words)
    assert refusal is not None
    assert [*refusal.advice] == advice
    for each in advice:
        assert each in str(refusal) or each.split()[1] in str(refusal)
        assert refusal_of([*words, *each.split()]) is None
