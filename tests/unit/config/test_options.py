"""The table of options says what the manual says, and leaves nothing without a text."""

import dataclasses
import typing

import pytest

from mobius.config.config import (
    Bounds,
    Config,
    DatasetEntry,
    Dtype,
    OptimConfig,
    OutputConfig,
    PipelineConfig,
)
from mobius.config.lr_schedules import LrSchedulerType
from mobius.config.options import (
    OptionValue,
    config_from,
    dataset_spellings,
    nearest_name,
    option_values,
    options,
    spellings,
)

# The manual's table: name, type, default.
MANUAL = [
    ("model_path", str, "meta-llama/Llama-2-7b-hf"),
    ("dataset", DatasetEntry, (DatasetEntry("xsum"),)),
    ("save_params", str, "finetune_params.pt"),
    ("save_results", str, "test_result.txt"),
    ("save_dir", str, "save_ckpt"),
    ("use_prefetch", bool, True),
    ("use_offload", bool, True),
    ("batch_size", int, 128),
    ("num_chunks", int, 4),
    ("seq_length", int, 512),
    ("num_iterations", int, None),  # 2, unless epochs are given
    ("num_stages", int, 8),
    ("num_layers", int, None),
    ("embedding_dim", int, None),
    ("ff_dim", int, None),
    ("num_heads", int, None),
    ("cuda_visible_devices", str, None),
    ("master_port", int, 29502),
]


@pytest.mark.parametrize(("name", "value_type", "default"), MANUAL)
def test_an_option_of_the_manual_has_its_type_and_default(name: str, value_type: type, default: OptionValue) -> None:
    option = options()[name]
    assert (option.value_type, option.default) == (value_type, default)


def test_every_field_has_a_text_and_appears_once() -> None:
    sections = [section for section in typing.get_type_hints(Config).values() if dataclasses.is_dataclass(section)]
    fields = [field.name for section in sections for field in dataclasses.fields(section)]
    assert list(options()) == fields
    assert len(set(fields)) == len(fields)
    for option in options().values():
        assert len(option.text) > 10, option.name
        assert option.text.endswith("."), option.name


def test_every_number_has_bounds() -> None:
    every = [*options().values(), *(spelling.option for spelling in dataset_spellings().values())]
    without = [option.name for option in every if option.value_type in (int, float) and not option.bounds]
    assert without == []


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("model", "model_path"),
        ("model_name_or_path", "model_path"),
        ("max_steps", "num_iterations"),
        ("output_dir", "save_dir"),
        ("cutoff_len", "seq_length"),
        ("max_length", "seq_length"),
        ("lr", "learning_rate"),
        ("num_micro_batches", "num_chunks"),
        ("bf16", "dtype"),
        ("no_offload", "use_offload"),
        ("no_prefetch", "use_prefetch"),
    ],
)
def test_an_alias_means_its_option(alias: str, name: str) -> None:
    assert spellings()[alias].option.name == name


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("batchsize", "batch_size"),
        ("num-stage", "num_stages"),
        ("learning_rat", "learning_rate"),
        ("use_prefech", "use_prefetch"),
    ],
)
def test_the_nearest_name_is_what_was_meant(misspelt: str, meant: str) -> None:
    assert nearest_name(misspelt) == meant


def test_nothing_is_near_to_an_unrelated_name() -> None:
    assert nearest_name("zzzqqq") is None


def test_the_flat_form_and_the_sections_hold_the_same() -> None:
    config = config_from({"batch_size": 6, "dtype": Dtype.FP32, "lr_scheduler_type": LrSchedulerType.LINEAR})
    assert config.pipeline.batch_size == 6
    assert config.model.dtype is Dtype.FP32
    assert config.optim.lr_scheduler_type is LrSchedulerType.LINEAR
    assert config_from(option_values(config)) == config
    assert config_from({}) == Config()


@pytest.mark.parametrize(
    ("warmup_steps", "num_iterations", "expected"),
    [(0.0, 100, 0), (0.03, 100, 3), (0.03, 2, 1), (0.07, 100, 7), (0.5, 5, 3), (1.0, 100, 1), (20.0, 100, 20)],
)
def test_warmup_is_a_number_of_steps_or_a_share_rounded_up(
    warmup_steps: float, num_iterations: int, expected: int
) -> None:
    assert OptimConfig(warmup_steps=warmup_steps, num_iterations=num_iterations).num_warmup_steps == expected


def test_steps_are_what_is_given_or_2_and_unknown_while_epochs_are_not_counted() -> None:
    assert OptimConfig().num_steps == 2
    assert OptimConfig(num_iterations=7).num_steps == 7
    assert OptimConfig(num_iterations=7, num_train_epochs=0.5).num_steps == 7
    with pytest.raises(AssertionError):
        _ = OptimConfig(num_train_epochs=0.5).num_steps


@pytest.mark.parametrize(
    ("text", "expected"), [(None, []), ("3", [3]), ("3-5", [3, 4, 5]), (" 7 - 8 ", [7, 8]), ("5-3", []), ("x", [])]
)
def test_steps_to_profile_are_one_or_a_range_with_both_ends(text: str | None, expected: list[int]) -> None:
    assert list(OutputConfig(profile_steps=text).profiled_steps) == expected


def test_derived_numbers_of_the_pipeline() -> None:
    pipeline = PipelineConfig(batch_size=64, num_chunks=8, use_prefetch=False)
    assert (pipeline.num_microbatches, pipeline.microbatch_size, pipeline.num_slots) == (8, 8, 1)
    assert PipelineConfig().num_slots == 2


@pytest.mark.parametrize(("given", "number"), [("auto", None), ("all", None), ("0", 0), ("12", 12)])
def test_resident_stages_are_a_number_or_a_word(given: str, number: int | None) -> None:
    assert PipelineConfig(resident_stages=given).num_resident_stages == number


@pytest.mark.parametrize(("given", "number"), [("auto", None), ("off", None), ("512", 512)])
def test_tokens_of_a_tile_are_a_number_or_a_word(given: str, number: int | None) -> None:
    assert PipelineConfig(tile_tokens=given).num_tile_tokens == number
    assert options()["tile_tokens"].from_yaml(number or given) == given


def test_a_number_of_resident_stages_may_be_written_in_yaml_as_one() -> None:
    assert options()["resident_stages"].from_yaml(3) == "3"
    assert options()["resident_stages"].from_yaml("all") == "all"
    for wrong in (True, 1.5, None):
        with pytest.raises(ValueError):
            options()["resident_stages"].from_yaml(wrong)
    with pytest.raises(ValueError):
        options()["model_path"].from_yaml(3)


def test_bounds_exclude_what_they_say() -> None:
    bounds = Bounds(minimum=0, below=1)
    assert [bounds.allow(value) for value in (-0.1, 0, 0.5, 1, float("nan"), float("inf"))] == [
        False, True, True, False, False, False,
    ]  # fmt: skip
    assert not Bounds(above=0).allow(0)
    assert str(bounds) == "at least 0 and below 1"


@pytest.mark.parametrize("name", ["num_stages", "num_chunks", "preprocessing_num_workers"])
def test_auto_is_a_number_that_is_chosen_later(name: str) -> None:
    option = options()[name]
    assert option.from_words(["auto"]) is None
    assert option.from_yaml("auto") is None
    assert option.expectation == "a whole number at least 1, or auto"
    for nothing in (None, "", "none"):
        with pytest.raises(ValueError):
            option.from_yaml(nothing)


def test_other_numbers_know_no_auto() -> None:
    with pytest.raises(ValueError):
        options()["batch_size"].from_words(["auto"])
