"""A plan as a file: what it says comes back, and what cannot be used is refused with what to change."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mobius.config.cli import parse_args
from mobius.config.config import Dtype, Order
from mobius.errors import PlanError
from mobius.planner.plan_file import ModelDigest, SavedPlan, apply_saved_plan, check_saved_plan, read_plan
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import MemoryUse, make_plan
from mobius.schedule.spec import ComputeOrder


@pytest.fixture
def saved(small: ModelShape) -> SavedPlan:
    plan = make_plan(small, num_ranks=2, num_stages=4, num_microbatches=2, num_slots=2)
    plan = replace(
        plan.with_memory_uses([MemoryUse(1, 0, 1), MemoryUse(0, 0, 1)]), saved_activation_stages=frozenset({2, 3})
    )
    return SavedPlan(ModelDigest.of(small, Dtype.BF16), plan, batch_size=8, seq_length=16)


def write(folder: Path, text: str) -> Path:
    path = folder / "plan.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_gives_the_plan_back(saved: SavedPlan, tmp_path: Path) -> None:
    other_slots = replace(saved, plan=saved.plan.with_memory_uses([MemoryUse(1, 0, 1), MemoryUse(0, 1, 2)]))
    for plan in (saved, other_slots):
        assert read_plan(write(tmp_path, plan.to_json())) == plan


def depth_first(saved: SavedPlan, *sum_buffers: int) -> SavedPlan:
    order = {"order": ComputeOrder.DEPTH_FIRST, "sum_buffers": sum_buffers, "spreads_head": len(sum_buffers) > 0}
    return replace(saved, plan=replace(saved.plan, slots=(1, 2), saved_activation_stages=frozenset(), **order))


def test_a_file_has_the_order_and_the_sum_buffers(saved: SavedPlan, tmp_path: Path) -> None:
    for plan in (depth_first(saved, 1, 2), depth_first(saved)):
        assert read_plan(write(tmp_path, plan.to_json())) == plan
    fields = json.loads(depth_first(saved, 1, 2).to_json())
    assert (fields["order"], fields["sum_buffers"], fields["spreads_head"]) == ("depth_first", [1, 2], True)


AT_32758930 = """{"version": 2,
 "model": {"num_parameters": 744, "num_layers": 5, "hidden_size": 4, "vocab_size": 60, "is_tied": true,
 "dtype": "bf16"},
 "batch_size": 8, "seq_length": 16, "num_ranks": 1, "num_microbatches": 2, "num_rounds": 1, "num_slices": 1,
 "kept_products": [], "kept_attention": [], "products_home": 0, "slots": [1], "sum_buffers": [0],
 "order": "breadth_first", "spread_head": false,
 "spans": [{"stage": 0, "first_layer": 0, "end_layer": 5, "is_first": true, "is_last": true}],
 "resident": [], "kept_activations": [0], "stashed_activations": []}
"""


def test_a_file_with_the_names_of_that_commit_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path, AT_32758930)
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    assert str(caught.value) == (
        f"--plan {path} has version 2, this program reads version 3. Name another file, make it again with --dry_run, "
        "or leave --plan out."
    )


def test_options_take_the_order_of_a_plan_and_another_one_is_refused(saved: SavedPlan, tmp_path: Path) -> None:
    path = write(tmp_path, depth_first(saved).to_json())
    words = ["--batch_size", "8", "--seq_length", "16", "--plan", str(path)]
    assert apply_saved_plan(parse_args(words), given=["plan"])[0].pipeline.compute_order is Order.DEPTH_FIRST
    for order, is_refused in (("auto", False), ("depth_first", False), ("breadth_first", True)):
        config = parse_args([*words, "--compute_order", order])
        with (
            pytest.raises(PlanError, match="--compute_order breadth_first, the plan has depth_first")
            if is_refused
            else nullcontext()
        ):
            apply_saved_plan(config, given=["plan", "compute_order"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: f.update(order="evaluation"), "`order` is evaluation, not breadth_first or depth_first"),
        (lambda f: f.update(order=1), "it has 1 for `order`, not one of breadth_first, depth_first"),
        (lambda f: f.update(sum_buffers=[1]), "`sum_buffers` of 1 ranks, not 2"),
        (lambda f: f.update(sum_buffers=[-1, 2]), r"`sum_buffers\[0\]`"),
        (lambda f: f.update(slots=[1, 1]), "rank 1 has 1 GPU slots for 2 streamed stages"),
        (
            lambda f: f.update(num_rounds=2),
            "a round has 1 microbatches, but depth-first stages need one for each of 2 ranks",
        ),
    ],
)
def test_a_depth_first_plan_that_cannot_run_is_refused(
    saved: SavedPlan, tmp_path: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    fields = json.loads(depth_first(saved, 1, 2).to_json())
    change(fields)
    with pytest.raises(PlanError, match=told):
        read_plan(write(tmp_path, json.dumps(fields)))


def test_a_file_says_what_it_is_of_and_everything_that_was_chosen(saved: SavedPlan) -> None:
    fields = json.loads(saved.to_json())
    assert fields["version"] == 3
    assert fields["model"] == {
        "num_parameters": 240 + 500 + 244 - 240,  # the tied matrix once
        "num_layers": 5,
        "hidden_size": 4,
        "vocab_size": 60,
        "is_tied": True,
        "dtype": "bf16",
    }
    assert (fields["num_ranks"], fields["num_microbatches"], fields["slots"]) == (2, 2, [1, 1])
    assert (fields["resident"], fields["saved_activation_stages"]) == ([0], [2, 3])
    assert (fields["batch_size"], fields["seq_length"]) == (8, 16)
    assert [(cut["first_layer"], cut["end_layer"]) for cut in fields["cuts"]] == [(0, 2), (2, 4), (4, 5), (5, 5)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: f.update(version=2), "has version 2, this program reads version 3"),
        (lambda f: f.pop("version"), "has version None"),
        (lambda f: f.pop("cuts"), "is broken: it lacks cuts"),
        (lambda f: f.update(num_ranks=3, slots=[1, 1, 1], sum_buffers=[]), "4 stages are not a multiple of 3 ranks"),
        (lambda f: f.update(num_ranks=0, slots=[], sum_buffers=[]), "`slots` of 0 ranks"),
        (
            lambda f: f.update(num_microbatches=3),
            "`--batch_size` 8 and `--num_chunks` 3: 8 has no 3 equal microbatches",
        ),
        (lambda f: f.update(num_microbatches=2.5), "it has 2.5 for `num_microbatches`, not a whole number from 0 on"),
        (lambda f: f.pop("order"), "is broken: it lacks order"),
        (lambda f: f.update(spans=[]), "is broken: it has spans"),
        (lambda f: f["cuts"].pop(), "3 stages are not a multiple of 2 ranks"),
        (lambda f: f["cuts"][1].update(first_layer=1), "do not hold the model's 5 layers one after the other"),
        (lambda f: f["cuts"][3].update(end_layer=7), "do not hold the model's 5 layers one after the other"),
        (lambda f: f.update(resident=[9]), r"`resident` is \[9\], and would be \[\]"),
        (lambda f: f.update(slots=[1]), "`slots` of 1 ranks, not 2"),
        (lambda f: f.update(slots=[0, 1]), "at least 1 of each, but it has 0 GPU slots"),
        (lambda f: f.update(slots=[1, 3]), r"`slots` is \[1, 3\], and would be \[1, 2\]"),
        (lambda f: f.update(saved_activation_stages=[1]), r"`saved_activation_stages` is \[1\], and would be \[3\]"),
        (
            lambda f: f.update(saved_activation_stages=[1, 3]),
            r"stages \[1, 3\] keep activations, but 1 slots cannot keep their weights",
        ),
        (lambda f: f.update(num_slices=2), r"the stages \[2, 3\] keep activations, but slices are recomputed"),
        (lambda f: f.update(num_slices=2**20, num_microbatches=2**20, seq_length=2**20), "`--num_slices` is 1048576"),
        (lambda f: f["model"].pop("dtype"), "is broken: it lacks dtype in `model`"),
        (lambda f: f.update(version=True), "has version True, "),
        (lambda f: f.update(version=3.0), "has version 3.0, "),
        (lambda f: f.update(version="9" * 5000), r"has version '99+\.\.\.9+', "),
        (lambda f: f.update(model=[1]), "is broken: it has .1. for `model`, not an object"),
        (lambda f: f["model"].update(dtype=7), "`model.dtype`"),
        (lambda f: f["model"].update(dtype="int8"), "`model.dtype`"),
        (lambda f: f["model"].update(num_layers="5"), "`model.num_layers`"),
        (lambda f: f["model"].update(hidden_size=[1]), "`model.hidden_size`"),
        (lambda f: f["model"].update(is_tied=1), "`model.is_tied`"),
        (lambda f: f["model"].update(color="red"), "`model`"),
        (lambda f: f["model"].update(num_parameters=10**4000), "`model.num_parameters`"),
        (lambda f: f.update(cuts=7), "`cuts`"),
        (lambda f: f.update(cuts=f["cuts"] * 5000), "`--num_stages` is 20000; it must be at least 1 and below 1025"),
        (lambda f: f.update(cuts=["x"]), r"`cuts\[0\]`"),
        (lambda f: f["cuts"][1].pop("stage"), r"`cuts\[1\]`"),
        (lambda f: f.update(cuts={"stage": 1}), "`cuts`"),
        (lambda f: f.update(slots=1), "`slots`"),
        (lambda f: f.update(slots="11"), "`slots`"),
        (lambda f: f.update(resident=[[0]]), r"`resident\[0\]`"),
        (lambda f: f.update(saved_activation_stages=None), "`saved_activation_stages`"),
        (lambda f: f.update(num_ranks=10**30), "`num_ranks`"),
        (lambda f: f.update(batch_size=10**400), "`batch_size`"),
        (lambda f: f.update(seq_length=0), "`--seq_length` is 0"),
        (lambda f: f.update(num_replicas=0), "it has 0 for `num_replicas`, which must be at least 1"),
        (lambda f: f.update(batch_size=2**31, num_microbatches=2**31), "`--batch_size`"),
    ],
)
def test_what_cannot_be_in_a_plan_is_told(
    saved: SavedPlan, tmp_path: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    fields = json.loads(saved.to_json())
    change(fields)
    with pytest.raises(PlanError, match=told) as caught:
        read_plan(write(tmp_path, json.dumps(fields)))
    assert "--dry_run" in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff\xfe{", "is no UTF-8 text"),
        (b"", "is empty"),
        (b" " * (1 << 25), "too large"),
    ],
    ids=["bytes", "empty", "large"],
)
def test_a_hostile_file_is_one_message(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=told):
        read_plan(path)


def test_a_file_that_is_missing_or_no_json_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json cannot be read: No such file.*Name another file"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(PlanError, match="is no JSON"):
        read_plan(write(tmp_path, "{"))
    with pytest.raises(PlanError, match="has version None"):
        read_plan(write(tmp_path, "[1, 2]"))


def test_a_plan_of_another_model_or_number_of_ranks_is_refused(saved: SavedPlan, small: ModelShape) -> None:
    path, model = Path("p.json"), ModelDigest.of(small, Dtype.BF16)
    check_saved_plan(saved, path, model=model, num_ranks=2)
    with pytest.raises(PlanError, match=r"of another model: hidden_size 4 \(here 8\), dtype bf16 \(here fp16\)"):
        check_saved_plan(saved, path, model=replace(model, hidden_size=8, dtype="fp16"), num_ranks=2)
    with pytest.raises(PlanError, match=r"is for 2 rank\(s\), 4 are started\. Start 2 .* --num_ranks 4"):
        check_saved_plan(saved, path, model=model, num_ranks=4)
