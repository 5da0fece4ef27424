"""One rank is late behind every collective and at its files: results stay the same, whichever rank that is."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.forked import Ranks
from harness.grids import named
from harness.runs import (
    assert_equal_tensors,
    environment,
    evaluations_of,
    make_checkpoint,
    make_dataset,
    run_main,
    steps_of,
)

LATE_SECONDS = 0.2
SMALL = """--dataset data.jsonl --fp32 --num_chunks 2 --batch_size 4 --seq_length 16 --val_size 4 --num_stages 4"""
TRAINS = f"""{SMALL} --model_path model --num_iterations 2 --learning_rate 1e-3 --warmup_steps 1
    --eval_strategy steps --eval_steps 1"""
JUDGES = "--do_predict --max_predict_samples 1 --max_new_tokens 2"
SAVES = "--save_steps 1 --save_total_limit 0"
BEST = f"{SAVES} --load_best_model_at_end"
LORA = "--use_lora --additional_target head --merge"
SETTINGS = {
    "full": f"{TRAINS} {BEST} {JUDGES} --trace --profile_steps 2-2",
    "at the end": f"{TRAINS} {JUDGES} --save_strategy no --profile_steps 2-2",
    "adapters": f"{TRAINS} {LORA} {BEST} {JUDGES} --trace",
    "adapters at the end": f"{TRAINS} {LORA} {JUDGES} --save_strategy no",
    "replicas": f"{TRAINS} {BEST} {JUDGES}",
    "replicas of adapters": f"{TRAINS} {LORA} {SAVES}",
    "evaluation": f"{SMALL} --model_path model --no_do_train --do_eval {JUDGES}",
    "answers": f"{SMALL} --model_path model --no_do_train {JUDGES}",
}
RESUMED = ("full", "adapters", "replicas")
CASES = {f"{name}, rank {late}": (name, late, False) for name in SETTINGS for late in (0, 1)}
CASES |= {f"{name} resumed, rank {late}": (name, late, True) for name in RESUMED for late in (0, 1)}
USUAL = ("full resumed, rank 0",)
Whole = Callable[[str], Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data, which all tests share."""
    folder = tmp_path_factory.mktemp("late")
    make_checkpoint(folder / "model")
    make_dataset(folder / "data.jsonl")
    return folder


@pytest.fixture(scope="module")
def whole(place: Path) -> Whole:
    """The folder of a run by its setting, in which nobody is late."""

    def folder(name: str) -> Path:
        save_dir = name.replace(" ", "-")
        if not (place / save_dir).exists():
            words = f"{SETTINGS[name]} {files_of(save_dir, SETTINGS[name])}".split()
            finished = run_main(2, place, *words, num_nodes=nodes_of(name))
            assert finished.returncode == 0, finished.stdout
        return place / save_dir

    return folder


def nodes_of(name: str) -> int:
    return 2 if name.startswith("replicas") else 1


def files_of(save_dir: str, options: str) -> str:
    """Words for files of a run's own; one that does not train leaves no parameters and no report."""
    own = f"--save_dir {save_dir}"
    return own if "--no_do_train" in options else f"{own} --save_params {save_dir}.pt --save_results {save_dir}.txt"


def late_run(place: Path, late: int, options: str, *, num_nodes: int) -> str:
    ranks = Ranks(
        "harness.late_ranks",
        "late_main",
        [late, LATE_SECONDS, "--device", "cpu", *options.split()],
        num_ranks=2,
        folder=place,
        environment=environment(place / "cache"),
        num_nodes=num_nodes,
    )
    code, output = ranks.wait(), ranks.output()
    assert code == 0, output
    return output


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize("case", named(CASES, on_demand=CASES.keys() - set(USUAL)))
def test_no_rank_depends_on_how_fast_another_one_is(place: Path, whole: Whole, case: tuple[str, int, bool]) -> None:
    name, late, resumes = case
    expected, options = whole(name), SETTINGS[name]
    save_dir = f"{expected.name}-late-{late}{'-resumed' * resumes}"
    if resumes:
        (place / save_dir).mkdir()
        shutil.copytree(expected / "checkpoint-1", place / save_dir / "checkpoint-1")
        options = f"--resume_from_checkpoint true {JUDGES}"  # to predict is a start's own wish

    output = late_run(place, late, f"{options} {files_of(save_dir, options)}", num_nodes=nodes_of(name))

    told = re.search(rf"rank {late} was late at (\d+) places", output)
    assert told, output
    assert int(told[1]) >= 5
    found = place / save_dir
    assert names(found) == names(expected)
    for path in expected.rglob("*.safetensors"):
        assert_equal_tensors(path.parent, found / path.parent.relative_to(expected))
    if (expected / "metrics.jsonl").exists():
        assert steps_of(found)[-1] == steps_of(expected)[-1]
        assert evaluations_of(found) == evaluations_of(expected)
    if not resumes and (expected / "generated_predictions.jsonl").exists():
        answers = [(each / "generated_predictions.jsonl").read_text() for each in (found, expected)]
        assert answers[0] == answers[1]


def test_a_plan_in_a_folder_that_is_settled_first_is_read_by_all_ranks(place: Path, whole: Whole) -> None:
    """An interrupted run left its plan, and the next one, in the same folder, is to follow it."""
    (place / "planned").mkdir()
    for file in ("plan.json", "training_args.yaml"):
        shutil.copy(whole("at the end") / file, place / "planned" / file)
    options = f"{TRAINS} --num_iterations 1 --save_strategy no --plan planned/plan.json {files_of('planned', TRAINS)}"

    output = late_run(place, 1, options, num_nodes=1)

    assert "plan read from planned/plan.json" in output
    assert (place / "planned" / "config.json").exists()
