"""`mobius.finetune` and `mobius.plan` from Python: the same run, the same errors, an end with the caller's."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
from harness.runs import ROOT

import mobius
from mobius import api
from mobius.config.cli import parse_args
from mobius.errors import CheckpointError, ConfigError, DataError, HostMemoryError, RunFailedError
from mobius.process.ranks import cache_folder

PAGE = (ROOT / "docs" / "user" / "python.md").read_text(encoding="utf-8")
RECORDS = [{"text": f"number {number} is followed by {number + 1}"} for number in range(12)]
SMALL: dict[str, Any] = {
    "device": "cpu",
    "nproc_per_node": 1,
    "num_stages": 2,
    "batch_size": 2,
    "num_chunks": 2,
    "seq_length": 32,
    "num_iterations": 2,
}


@pytest.mark.extended
def test_the_example_of_the_page_trains_and_its_result_has_what_the_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    events: list[Mapping[str, Any]] = []
    names: dict[str, Any] = {}
    more = "device='cpu', nproc_per_node=1, save_params='a.pt', save_results='b.txt', on_event=events.append, **options"
    exec(
        example.replace("assets/tiny-llama", str(ROOT / "assets" / "tiny-llama")).replace("**options", more),
        {"events": events},
        names,
    )
    result = names["result"]
    assert [event["event"] for event in events] == ["start", "step", "step", "end"]
    assert [step["loss"] for step in result.history] == [event["loss"] for event in events[1:3]]
    assert (result.folder / "model.safetensors").is_file()
    assert result.metrics["train_loss"] > 0
    assert result.plan["num_ranks"] == 1


@pytest.mark.extended
def test_an_error_of_a_rank_is_raised(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model"):  # the launcher does not look there
        mobius.finetune(tmp_path / "model", RECORDS, save_dir=tmp_path / "out", **SMALL)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[str]]:
    """A program in the place of the launcher; returns a function that sets it and the list of its words."""
    words: list[str] = []

    def use(program: str) -> list[str]:
        file = tmp_path / "program.py"
        file.write_text(f"import json, os, signal, sys, time\n{program}\n")

        def command(given: list[str], *_: object) -> tuple[list[str], None]:
            words.extend(given)
            return ["env", sys.executable, str(file)], None

        monkeypatch.setattr(api, "launch_command", command)
        return words

    return use


def test_a_result_has_what_the_folder_has(stand_in: Callable[[str], list[str]], tmp_path: Path) -> None:
    files = {
        "events.jsonl": [{"event": "step", "step": 1, "time": 0}, {"event": "end", "time": time.time() + 60}],
        "metrics.jsonl": [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 1.5}],
        "all_results.json": [{"train_loss": 2.0}],
        "plan.json": [{"num_ranks": 2}],
    }
    program = [f"open({str(tmp_path / name)!r}, 'w').write({_lines(rows)!r})" for name, rows in files.items()]
    stand_in("; ".join(program))
    events: list[Mapping[str, Any]] = []
    result = mobius.finetune("m", "a.jsonl", save_dir=tmp_path, on_event=events.append, progress=False)
    assert [event["event"] for event in events] == ["end"]  # the other one is of an earlier run
    assert (result.folder, result.metrics, result.plan) == (tmp_path, {"train_loss": 2.0}, {"num_ranks": 2})
    assert [step["loss"] for step in result.history] == [2.5, 1.5]


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_handler_that_fails_lets_the_run_save(stand_in: Callable[[str], list[str]], tmp_path: Path) -> None:
    saved, feed = tmp_path / "saved", tmp_path / "events.jsonl"
    stand_in(
        f"signal.signal(15, lambda *_: (print('x' * 200_000), open({str(saved)!r}, 'w').close(), sys.exit(130)))\n"
        f"open({str(feed)!r}, 'w').write(json.dumps(dict(event='step', time=time.time() + 60)) + chr(10))\n"
        "print('a step', flush=True); time.sleep(60)"
    )
    with pytest.raises(ZeroDivisionError):
        mobius.finetune("m", "a.jsonl", save_dir=tmp_path, on_event=lambda _: 1 / 0, progress=False)
    assert saved.is_file()


def test_options_become_words(stand_in: Callable[[str], list[str]], tmp_path: Path) -> None:
    words = stand_in("sys.exit(0)")
    mobius.finetune(
        "m",
        ["a.jsonl", "b.jsonl:0.3"],
        save_dir=tmp_path,
        master_port=29533,
        use_offload=False,
        seed=None,
        learning_rate=1e-5,
    )
    assert words == [
        *("--model_path=m", "--dataset", "a.jsonl", "b.jsonl:0.3", f"--save_dir={tmp_path}", "--master_port=29533"),
        *("--use_offload=false", "--learning_rate=1e-05"),
    ]
    words.clear()
    more: dict[str, Any] = {"lr_scheduler_kwargs": {"min_lr": 0}, "report_to": ["wandb", "tensorboard"]}
    mobius.finetune("m", "a.jsonl", output_dir=tmp_path, master_port=29533, **more)
    assert words[2:] == [
        f"--save_dir={tmp_path}", "--master_port=29533", "--lr_scheduler_kwargs=min_lr=0",
        "--report_to=wandb,tensorboard",
    ]  # fmt: skip


def test_an_objective_is_an_option_and_trl_names_of_it_are_read_as_its_files_are(
    stand_in: Callable[[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, pairs = stand_in("sys.exit(0)"), [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    mobius.finetune("m", pairs, save_dir=tmp_path, objective="dpo", beta=0.2, loss_type="ipo", seq_length=64)
    found = parse_args([word for word in words if not word.startswith("--master_port")], is_command=True)
    own = found.objective
    assert (own.objective, own.beta, own.loss_type, found.data.seq_length) == ("dpo", 0.2, "ipo", 64)

    words.clear()
    names: dict[str, Any] = {"beta": 0.3, "loss_type": ["hinge"], "max_length": 64, "per_device_train_batch_size": 2}
    mobius.finetune("m", pairs, save_dir=tmp_path, nproc_per_node=1, **names)
    found = parse_args([word for word in words if not word.startswith("--master_port")], is_command=True)
    own = found.objective
    assert (own.objective, own.beta, own.loss_type, found.data.seq_length) == ("dpo", 0.3, "hinge", 128)
    assert "seq_length 128 = 2 x max_length 64" in capsys.readouterr().out

    with pytest.raises(ConfigError, match=r"`--beta` has no effect without --objective dpo or"):
        parse_args(["--beta", "0.1"], is_command=True)
    with pytest.raises(ConfigError, match="one loss at a time"):
        mobius.finetune("m", pairs, **names | {"loss_type": ["sigmoid", "sft"]})


class Model:
    def state_dict(self) -> dict[str, object]:
        return {}


UNCLEAR: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("abbreviation", ("m", "d"), {"learning_rat": 1}, "unknown option `learning_rat`; did you mean `learning_rate`?"),
    ("two", ("m", "d"), {"batch_siz": 1, "seq_len": 2}, "(?s)`batch_siz`.*`batch_size`.*`seq_len`.*seq_length"),
    ("nothing like it", ("m", "d"), {"zzz": 1}, "unknown option `zzz`; docs/user/options.md has all options"),
    ("no data", ("m", None), {}, "`dataset` is None: give a name, files or records; to evaluate only"),
    ("no data at all", ("m",), {}, "`dataset` is None"),
    ("integer", ("m", 7), {}, "`dataset` is int: give a name, a file or folder, a list of them, or records"),
    ("bytes", ("m", b"a"), {}, "`dataset` is bytes: give a name"),
    ("columns", ("m", {"text": ["a", "b"]}), {}, r"`dataset` has text: give one split, such as data\['train'\], or a"),
    ("no train split", ("m", {"test": RECORDS}), {}, "`dataset` has test: give one split"),
    (
        "two splits",
        ("m", "d"),
        {"eval_dataset": {"test": RECORDS, "validation": RECORDS}},
        "has test, validation: give",
    ),
    ("model", (Model(), "d"), {}, r"`model` is .*Model: give a name or a folder; save it with its tokenizer"),
    ("no model", (None, "d"), {}, "`model` is NoneType: give a name or a folder$"),
    ("help", ("m", "d"), {"help": True}, r"unknown option `help`: help\(mobius.finetune\) prints"),
    ("dry run", ("m", "d"), {"dry_run": True}, r"`dry_run`: finetune trains; mobius.plan\(model, ...\) plans a run"),
    ("preview", ("m", "d"), {"preview": 3}, "`preview`: finetune trains; `mobius preview --model_path"),
    ("object", ("m", "d"), {"learning_rate": object()}, "`learning_rate` is object: give a number, a text, or a list"),
    ("two folders", ("m", "d"), {"save_dir": "a", "output_dir": "b"}, "`save_dir` and `output_dir` are one option"),
    ("TRL's data", ("m", "d"), {"dataset_name": "e"}, "the data are the argument `dataset`"),
    ("TRL's other", ("m", "d"), {"per_device_train_batch_size": "x"}, "`per_device_train_batch_size: 'x'`: it must be"),
]


@pytest.mark.parametrize(("args", "keywords", "message"), [case[1:] for case in UNCLEAR], ids=[c[0] for c in UNCLEAR])
def test_what_python_cannot_mean_is_answered_by_what_to_do(
    args: tuple[Any, ...], keywords: dict[str, Any], message: str, stand_in: Callable[[str], list[str]]
) -> None:
    words = stand_in("sys.exit(0)")
    with pytest.raises(ConfigError, match=message):
        mobius.finetune(*args, **keywords)
    assert words == []


def test_a_plan_takes_no_abbreviation_either() -> None:
    with pytest.raises(ConfigError, match="unknown option `num_rank`; did you mean `num_ranks`?"):
        mobius.plan("8b", card="RTX4090", num_rank=2)


def test_values_without_words_are_named(stand_in: Callable[[str], list[str]]) -> None:
    """Those that hold themselves, are too deep or too long, and frames that JSON cannot write."""
    words, own = stand_in("sys.exit(0)"), dict[str, Any]()
    deep: list[Any] = []
    own["a"] = own
    for _ in range(100_000):
        deep = [deep]
    for value in (own, deep, 10**5000):
        for name in ("hub_model_id", "lora_r", "seed"):
            with pytest.raises(ConfigError, match=f"`{name}` cannot be written as text"):
                mobius.finetune("model", RECORDS, **{name: value})
    with pytest.raises(DataError, match=r"dataset\[0\] cannot be written as JSON"):
        mobius.finetune("model", [{"text": deep}])
    for frame in (pandas.DataFrame([[1, 2]], columns=["text", "text"]), pandas.DataFrame({"text": [b"\xff"]})):
        with pytest.raises(DataError, match="`dataset` is a DataFrame that cannot be written as JSON"):
            mobius.finetune("model", frame)
    assert words == []


@pytest.mark.parametrize("form", ["frame", "splits", "paths", "rows"])
def test_records_come_in_the_forms_that_people_have(
    form: str, stand_in: Callable[[str], list[str]], tmp_path: Path
) -> None:
    rows = datasets.Dataset.from_list(RECORDS)
    data: Any = {
        "frame": pandas.DataFrame([*RECORDS, {"text": None}]),
        "splits": datasets.DatasetDict({"train": rows, "test": rows}),
        "paths": [tmp_path / "a.jsonl", "b.jsonl:0.3"],
        "rows": rows,
    }[form]
    words = stand_in("sys.exit(0)")
    mobius.finetune("m", data, eval_dataset=None if form == "paths" else {"test": rows}, progress=False)
    if form == "paths":
        assert words[1:4] == ["--dataset", str(tmp_path / "a.jsonl"), "b.jsonl:0.3"]
        return
    train, held_out = (
        [json.loads(line) for line in Path(word.partition("=")[2]).read_text().splitlines()] for word in words[1:3]
    )
    assert train == ([*RECORDS, {"text": None}] if form == "frame" else RECORDS)
    assert held_out == RECORDS


def test_names_of_trl_are_taken_as_its_files_are(
    stand_in: Callable[[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = stand_in("sys.exit(0)")
    config: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_length": 256,
        "warmup_ratio": 0.1,
        "bf16": True,
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "gradient_checkpointing": True,
    }
    mobius.finetune("m", "d", nproc_per_node=3, lr_scheduler_type="cosine", **config)
    found = parse_args([word for word in words if not word.startswith("--master_port")], is_command=True)
    assert (found.pipeline.batch_size, found.pipeline.num_chunks, found.data.seq_length) == (24, 12, 256)
    assert (found.output.save_dir, found.optim.warmup_steps, found.model.dtype) == (str(tmp_path), 0.1, "bf16")
    assert found.optim.schedule_arguments == {"num_cycles": 2}
    assert "packing" not in " ".join(words), "only names that are given count, not TRL's defaults"
    assert "batch_size 24 = per_device_train_batch_size 2 x" in (shown := capsys.readouterr().out)
    assert "no effect here: gradient_checkpointing" in shown


def test_a_bad_record_is_named_by_its_index(stand_in: Callable[[str], list[str]]) -> None:
    message = "{path}, line 4: the column text is missing; the first is in {path}, line 1"
    stand_in(
        "import glob\n"
        f"path = glob.glob({str(cache_folder() / 'records' / '*.jsonl')!r})[0]\n"
        f"json.dump(dict(type='DataError', message={message!r}.format(path=path)), "
        "open(os.environ['MOBIUS_ERROR_FILE'], 'w')); sys.exit(1)"
    )
    with pytest.raises(DataError, match=r"^dataset\[3\]: the column text is missing; the first is in dataset\[0\]$"):
        mobius.finetune("m", RECORDS, progress=False)


def test_the_package_lists_its_functions() -> None:
    assert dir(mobius) == ["Forecast", "Result", "__version__", "finetune", "plan"]


def test_records_are_written_once_and_refused_where_they_cannot_be(stand_in: Callable[[str], list[str]]) -> None:
    words = stand_in("sys.exit(0)")
    for _ in range(2):
        mobius.finetune("m", iter(RECORDS), progress=False)
    files = {word.partition("=")[2] for word in words if word.startswith("--dataset=")}
    (file,) = map(Path, files)
    assert file.parent == cache_folder() / "records"
    assert [json.loads(line) for line in file.read_text().splitlines()] == RECORDS
    circle: dict[str, object] = {}
    circle["text"] = circle
    for data, message in (
        ([{"text": "a"}, {"text": b"x"}], r"dataset\[1\]"),
        ([circle], r"dataset\[0\]"),
        ([7], r"dataset\[0\] is int"),
        ([], "no records"),
    ):
        with pytest.raises(DataError, match=message):
            mobius.finetune("m", data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        (
            "json.dump({'type': 'HostMemoryError', 'message': '3 GiB are missing'}, "
            "open(os.environ['MOBIUS_ERROR_FILE'], 'w')); sys.exit(1)",
            HostMemoryError,
            "3 GiB are missing",
        ),
        ("print('the last words'); os.kill(os.getpid(), signal.SIGKILL)", RunFailedError, "-9\nthe last words"),
        (
            "json.dump({'type': 'KeyError', 'message': 'KeyError: 3'}, open(os.environ['MOBIUS_ERROR_FILE'], 'w')); "
            "sys.exit(1)",
            RunFailedError,
            "KeyError: 3",
        ),
    ],
)
def test_a_run_that_fails_raises_its_error(
    stand_in: Callable[[str], list[str]], program: str, kind: type[Exception], message: str
) -> None:
    stand_in(program)
    with pytest.raises(kind, match=message):
        mobius.finetune("m", "a.jsonl", progress=False)


CALLER = """
import mobius, sys
from mobius import api
api.launch_command = lambda *_: (["env", sys.executable, sys.argv[1]], None)
mobius.finetune("m", "a.jsonl")
"""
CHILD = """
import signal, sys, time
from mobius.process.signal_handling import stop_with_caller
def end(number, frame):
    open(sys.argv[0] + ".end", "w").write(signal.Signals(number).name)
    sys.exit(130)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
stop_with_caller()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "received"), [(signal.SIGINT, "SIGINT"), (signal.SIGKILL, "SIGTERM")], ids=["Ctrl-C", "killed"]
)
def test_a_run_saves_and_ends_with_its_caller(tmp_path: Path, sent: signal.Signals, received: str) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, str(tmp_path / "child.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == "ready\n"
    caller.send_signal(sent)
    assert "KeyboardInterrupt" in caller.communicate()[1] or sent is signal.SIGKILL
    end, deadline = tmp_path / "child.py.end", time.monotonic() + 30
    while not (end.is_file() and end.read_text()) and time.monotonic() < deadline:  # it is empty when it is made
        time.sleep(0.01)
    assert end.read_text() == received


def test_the_plan_of_the_page_needs_no_gpu() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {}, names)
    plan = names["plan"]
    assert plan.fits
    assert plan.tokens_per_second
    assert "RTX4090" in plan.describe()
    assert isinstance(plan, mobius.Forecast)
    assert repr(plan).startswith("<Forecast of 8b (the shape of meta-llama/Llama-3.1-8B) on 2 x RTX4090\nthe run ")
    assert len(repr(plan).splitlines()) <= 10
