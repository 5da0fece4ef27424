"""A YAML file is read as people write it; what is wrong is told with its line."""

import os
import time
from pathlib import Path

import pytest

from mobius.config.cli import parse_args
from mobius.config.config import Compile, DatasetEntry, Dtype, Packing
from mobius.config.options import config_from
from mobius.config.yaml_file import to_yaml
from mobius.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "configs").glob("*.yaml"))


def write(folder: Path, text: str) -> str:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_there_are_configs() -> None:
    assert {"evaluate.yaml", "fine_tune.yaml", "long_run.yaml", "quickstart.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_config_loads_for_the_number_of_ranks_it_is_meant_for(file: Path) -> None:
    launch = parse_args(["--config", str(file)]).launch
    num_ranks = launch.nproc_per_node or len((launch.cuda_visible_devices or "0").split(","))
    parse_args(["--config", str(file)], num_ranks=num_ranks)


def test_fine_tune_holds_the_values_of_the_readme() -> None:
    config = parse_args(["--config", str(ROOT / "configs/fine_tune.yaml")], num_ranks=4)
    assert (config.pipeline.batch_size, config.pipeline.num_chunks, config.pipeline.num_stages) == (64, 4, 8)
    assert (config.data.seq_length, config.optim.num_iterations, config.model.num_layers) == (128, 2, 32)
    assert (config.model.model_path, config.data.dataset) == ("meta-llama/Llama-2-7b-hf", (DatasetEntry("xsum"),))
    assert (config.output.save_results, config.output.save_dir) == ("test_result.txt", "save_ckpt")
    assert (config.pipeline.use_prefetch, config.pipeline.use_offload) == (True, True)
    assert (config.launch.cuda_visible_devices, config.launch.master_port) == ("0,2,1,3", 29502)


def test_the_command_line_goes_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "model: a\nbatch_size: 32\nuse_offload: false\nbf16: false\nfp16: true\n")
    config = parse_args(["--config", file, "--batch_size", "8", "--use_offload", "--model_path", "b"])
    assert (config.pipeline.batch_size, config.pipeline.use_offload, config.model.model_path) == (8, True, "b")
    assert config.model.dtype is Dtype.FP16
    assert config.data.seq_length == 512


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "1E-05", "0.00001", "+1e-5", ".1e-4"])
def test_numbers_with_an_exponent_are_numbers(tmp_path: Path, text: str) -> None:
    assert parse_args(["--config", write(tmp_path, f"lr: {text}\n")]).optim.learning_rate == pytest.approx(1e-5)


def test_packing_may_be_on_or_off_in_yaml(tmp_path: Path) -> None:
    assert parse_args(["--config", write(tmp_path, "packing: on\npreview: 5\n")]).data.packing is Packing.ON
    assert parse_args(["--config", write(tmp_path, "packing: off\n")]).data.packing is Packing.OFF


@pytest.mark.parametrize(("text", "value"), [("on", Compile.ON), ("off", Compile.OFF), ("auto", Compile.AUTO)])
def test_the_bare_words_on_and_off_are_choices_where_an_option_has_them(
    tmp_path: Path, text: str, value: Compile
) -> None:
    assert parse_args(["--config", write(tmp_path, f"compile: {text}")]).pipeline.compile is value


def test_a_name_that_looks_like_an_exponent_in_quotes_stays_text(tmp_path: Path) -> None:
    assert parse_args(["--config", write(tmp_path, "dataset: '1e5'\n")]).data.dataset == (DatasetEntry("1e5"),)


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "no_prefetch: false\nnum_layers:\n"])
def test_a_file_may_leave_everything_at_its_default(tmp_path: Path, text: str) -> None:
    assert parse_args(["--config", write(tmp_path, text)]) == parse_args([])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("seed: 1\nbatchsize: 3\n", ["line 2", "unknown key `batchsize`", "`batch_size`"]),
        ("batch_size: '64'\n", ["line 1", "`batch_size: '64'`", "whole number"]),
        ("batch_size: true\n", ["`batch_size: True`", "whole number"]),
        ("batch_size: 64.0\n", ["whole number"]),
        ("batch_size: [64]\n", ["whole number"]),
        ("batch_size:\n", ["`batch_size: None`", "whole number"]),
        ("learning_rate: fast\n", ["`learning_rate: 'fast'`", "a number above 0"]),
        ("learning_rate: true\n", ["a number above 0"]),
        ("use_prefetch: 1\n", ["`use_prefetch: 1`", "true or false"]),
        ("dataset: 12\n", ["text in quotes"]),
        ("dtype: int8\n", ["bf16, fp16, fp32"]),
        ("seed: 1\nlr: 1e-4\nseed: 2\n", ["line 3", "`seed` is already set on line 1"]),
        ("seq_length: 128\ncutoff_len: 256\n", ["line 2", "`seq_length` and `cutoff_len`"]),
        ("bf16: true\nfp16: true\n", ["line 2", "`bf16` and `fp16`"]),
        ("training:\n  seed: 1\n", ["line 1", "unknown key `training`"]),
        ("- seed\n", ["expected lines of `option: value`"]),
        ("seed: [1\n", ["not valid YAML"]),
        ("logging_steps: 0\n", ["`--logging_steps` is 0", "at least 1"]),
        ("seed: 1\nbatch_size: 2024-99-99\n", ["line 2", "`batch_size: '2024-99-99'`", "whole number"]),
        ("batch_size: !!int abc\n", ["line 1", "`batch_size: !!int abc`", "whole number"]),
        ("batch_size: !!int ''\n", ["`batch_size: !!int `", "whole number"]),
        ("dataset: !!timestamp abc\n", ["`dataset: !!timestamp abc`", "text"]),
        ("dataset: !!python/object:os.system x\n", ["`dataset: !!python/object:os.system x`", "text"]),
        ("use_prefetch: !!bool maybe\n", ["`use_prefetch: !!bool maybe`", "true or false"]),
        ("batch_size: !foo bar\n", ["`batch_size: !foo bar`", "whole number"]),
        ("batch_size: {[1]: 2}\n", ["line 1", "`batch_size: {...}`", "whole number"]),
        ("batch_size: &a [*a]\n", ["`batch_size: [...]`", "whole number"]),
        ("a: &a [x, x]\n", ["line 1", "unknown key `a`"]),
        ("? [a]\n: b\n", ["line 1", "`[...]`", "the name of an option"]),
        ("? {a: b}\n: b\n", ["line 1", "`{...}`", "the name of an option"]),
        ("seed: 1\n<<: {seed: 2}\n", ["line 2", "unknown key `<<`"]),
        ("seed: 1\ndataset: a\0b\n", ["line 2", "U+0000"]),
        ("dataset: \x1b[2J\n", ["line 1", "U+001B"]),
        ('dataset: "a\\0b"\n', ["`--dataset`", "NUL"]),
        ('dataset: "\\ud800"\n', ["`--dataset`", "half of a character"]),
        ("batch_size: " + "9" * 5000 + "\n", ["line 1", "...", "whole number"]),
        ("batch_size: " + "9" * 400 + "\n", ["`--batch_size` is 999", "...", "below 2147483648"]),
        ("learning_rate: " + "9" * 400 + "\n", ["line 1", "a number above 0"]),
        ("learning_rate: .inf\n", ["`--learning_rate` is inf", "above 0"]),
        ("learning_rate: .nan\n", ["`--learning_rate` is nan", "above 0"]),
        ("seed: 1\nlr: " + "[" * 100_000, ["line 2", "nested too deeply"]),
        ("lr: " + "[" * 400 + "]" * 400, ["line 1"]),
        ("\tseed: 1\n", ["line 1", "not valid YAML", "'\\t'"]),
        ("seed: 1\n---\nseed: 2\n", ["line 2", "another document"]),
        ('seed: "\\UFFFFFFFF"\n', ["line 1", "not valid YAML"]),
        ("%YAML " + "9" * 5000 + ".1\n---\nseed: 1\n", ["line 1", "not valid YAML"]),
        ("seed: *nothing\n", ["line 1", "undefined alias"]),
        ("x" * 1000 + ": 1\n", ["line 1", "unknown key `xxx", "..."]),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(["--config", write(tmp_path, text)])
    (problem,) = caught.value.problems
    for part in parts:
        assert part in problem
    assert len(problem) < 400 + len(str(tmp_path))


def test_one_broken_value_does_not_hide_the_others(tmp_path: Path) -> None:
    file = write(tmp_path, "seed: !!int abc\nlr: [1]\nbatch_size: 2024-99-99\n<<: *x\n".replace("*x", "{}"))
    with pytest.raises(ConfigError) as caught:
        parse_args(["--config", file])
    assert [problem.partition(": ")[0][-6:] for problem in caught.value.problems] == [f"line {n}" for n in (1, 2, 3, 4)]


def test_a_file_that_is_nothing_but_mistakes_is_told_by_its_first_ones(tmp_path: Path) -> None:
    file = write(tmp_path, "".join(f"nonsense{number}: 1\n" for number in range(5000)))
    with pytest.raises(ConfigError) as caught:
        parse_args(["--config", file, "--num_chunks", "5"])
    assert len(caught.value.problems) == 101
    assert caught.value.problems[-1].endswith("run.yaml, line 101: the rest was not read, for there are 100 problems")


def test_aliases_that_multiply_take_no_time(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 9) + "]" for n in range(1, 12)]
    file = write(tmp_path, "\n".join([*lines, "dataset: *a11"]))
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=r"line 13: `dataset: \[\.\.\.\]`; text, or a list"):
        parse_args(["--config", file])
    assert time.perf_counter() - start < 1


def test_a_name_that_looks_like_a_date_is_text(tmp_path: Path) -> None:
    assert parse_args(["--config", write(tmp_path, "dataset: 2024-01-01\n")]).data.dataset == (
        DatasetEntry("2024-01-01"),
    )


def test_a_byte_order_mark_before_utf_8_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfseed: 5\n")
    assert parse_args(["--config", str(tmp_path / "bom.yaml")]).optim.seed == 5


def test_the_null_device_is_an_empty_file() -> None:
    assert parse_args(["--config", os.devnull]) == parse_args([])


def test_what_is_no_file_of_options_is_neither_waited_for_nor_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.yaml").write_text("# filling\n" * 100_000)
    (tmp_path / "wide.yaml").write_text("seed: 1", encoding="utf-16")
    found = {
        str(tmp_path / "pipe"): "not a file",
        "/dev/zero": "not a file",
        str(tmp_path): "Is a directory",
        str(tmp_path / "large.yaml"): "too large",
        str(tmp_path / "wide.yaml"): "not a UTF-8",
        "x" * 5000: "File name too long",
        "a\0b": "null",
        "\ud800": "surrogates",
    }
    for path, part in found.items():
        with pytest.raises(ConfigError, match=part) as caught:
            parse_args(["--config", path])
        assert len(caught.value.problems) == 1


def test_agreeing_spellings_are_no_conflict(tmp_path: Path) -> None:
    file = write(tmp_path, "use_prefetch: false\nno_prefetch: true\nseq_length: 64\nmax_length: 64\n")
    config = parse_args(["--config", file])
    assert not config.pipeline.use_prefetch
    assert config.data.seq_length == 64


def test_a_file_that_is_not_text_or_not_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path, part in ((tmp_path / "binary.yaml", "not a UTF-8"), (tmp_path, "cannot be read")):
        with pytest.raises(ConfigError, match=part):
            parse_args(["--config", str(path)])


def test_auto_is_written_as_auto_and_read_back(tmp_path: Path) -> None:
    config = config_from({"num_stages": None, "num_chunks": None})
    text = to_yaml(config)
    assert "num_stages: auto\n" in text
    assert "preprocessing_num_workers: auto\n" in text
    (tmp_path / "auto.yaml").write_text(text)
    assert parse_args(["--config", str(tmp_path / "auto.yaml")], num_ranks=3) == config
