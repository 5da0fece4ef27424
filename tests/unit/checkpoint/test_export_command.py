"""`mobius export` writes what the folder holds, to the bit where no format changes, checks it, and leaves it whole."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.durable_runs import DISKS, fail_after_step_5, leave_alone
from harness.runs import TOKENIZER, make_checkpoint, tensors_of
from harness.small_run import Run
from harness.tiny_families import tiny_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mobius.checkpoint.export_command import export
from mobius.checkpoint.folder_check import check_folder
from mobius.checkpoint.folders import find_checkpoints
from mobius.checkpoint.slot_reader import is_durable_step
from mobius.commands import run_command
from mobius.errors import CheckpointError, ConfigError, HostMemoryError, MobiusError


def model_tensors(folder: str) -> Mapping[str, torch.Tensor]:
    return {n: t for path in Path(folder).glob("model*.safetensors") for n, t in load_file(path).items()}


def left(workplace: Path) -> set[str]:
    return {path.name for path in workplace.iterdir()}


@pytest.mark.usefixtures("eight")
def test_a_checkpoint_becomes_a_plain_folder_with_its_bits_and_a_line_for_each_check(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("export", ["out/checkpoint-4", "plain", "--one_file"]) == 0
    *checks, written = capsys.readouterr().out.splitlines()
    names = [line[7:30].strip() for line in checks]
    ours, others = ["config.json", "tokenizer", "generation_config.json", "tensors", "number format", "files"], 2
    assert names == [*ours, "llama.cpp", "vLLM"]
    assert {line[:2] for line in checks[:-others]} == {"ok"}
    assert {line[:4] for line in checks[-others:]} == {"note"}
    assert "39 of 39 names in the table of gguf" in checks[-2]
    assert "lists LlamaForCausalLM" in checks[-1]
    assert written == "written: plain"
    assert left(workplace) == {"model", "data.jsonl", "out", "plain"} | {p.name for p in workplace.glob("*.txt")}
    stored = model_tensors("out/checkpoint-4")
    plain = load_file("plain/model.safetensors")
    assert plain.keys() == stored.keys()
    assert all(torch.equal(plain[name], value) for name, value in stored.items())
    assert {path.name for path in Path("plain").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    damaged = next(Path("out/checkpoint-4").glob("model*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert run_command("export", ["out/checkpoint-4", "again"]) == 1
    assert "damaged" in capsys.readouterr().err
    assert not Path("again").exists()
    export(["out", "result"])
    assert {"README.md", "training_loss.png"} <= {path.name for path in Path("result").iterdir()}


@pytest.mark.extended
def test_a_durable_step_becomes_a_plain_folder(run: Run, workplace: Path) -> None:
    fail_after_step_5(run, DISKS)
    leave_alone(run, f"{DISKS} --save_steps 1")
    newest, _ = find_checkpoints(Path("cut")).valid[0]
    assert is_durable_step(newest)
    export([str(newest), "plain"])
    stored, plain = model_tensors("whole/checkpoint-5"), model_tensors("plain")
    assert plain.keys() == stored.keys()
    assert all(torch.equal(plain[name], value) for name, value in stored.items())


@pytest.mark.parametrize("states", ["fp32", "compact"])
def test_in_fp32_a_checkpoint_gives_its_masters_which_another_run_goes_on_with(run: Run, states: str) -> None:
    """In bf16 most of a small update would be rounded away."""
    options = f"--dtype bf16 --optimizer_states {states} --num_iterations 1 --save_steps 1 --save_params none".split()
    run(*options, "--save_results", "auto")
    export(["out/checkpoint-1", "masters", "--dtype", "fp32"])
    weights, masters = model_tensors("out/checkpoint-1"), model_tensors("masters")
    for name, value in masters.items():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value, weights[name].float(), rtol=2**-8, atol=0)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())

    options += ["--model_path", "masters", "--learning_rate", "1e-30", "--save_dir", "next"]
    run(*options, "--save_results", "auto")
    export(["next/checkpoint-1", "again", "--dtype", "fp32"])
    again = model_tensors("again")
    assert all(torch.equal(again[name], value) for name, value in masters.items())


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text"])
def test_files_have_the_names_that_transformers_stores(workplace: Path, family: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = make_checkpoint(Path("own"), family=family, num_layers=2, **(experts if family == "qwen3_moe" else {}))
    Path("own/generation_config.json").unlink(missing_ok=True)
    export(["own", "half", "--dtype", "fp16"])
    model.half().save_pretrained("expected")
    expected, found = tensors_of(Path("expected")), tensors_of(Path("half"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert json.loads(Path("half/config.json").read_text())["dtype"] == "float16"
    export(["half", "same"])
    assert {value.dtype for value in tensors_of(Path("same")).values()} == {torch.float16}  # as the folder's
    again = AutoModelForCausalLM.from_pretrained("half")
    assert again.generation_config.eos_token_id == model.config.eos_token_id


def test_weights_that_transformers_keeps_in_fp32_stay_so(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v2", vocab_size=4096 + 64), dtype=torch.bfloat16)
    model.save_pretrained("own")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, Path("own", name))
    assert run_command("export", ["own", "same", "--dtype", "bf16"]) == 0
    assert re.search("number format  .*bfloat16, and float32 of [34] as transformers keeps", capsys.readouterr().out)
    found, expected = tensors_of(Path("same")), tensors_of(Path("own"))
    assert found.keys() == expected.keys()
    assert all(found[name].dtype is tensor.dtype for name, tensor in expected.items())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def broken(change: Callable[[Path], object]) -> str:
    """Message of the checks about a copy of the model that `change` has changed."""
    shutil.copytree("model", "broken")
    change(Path("broken"))
    with pytest.raises(CheckpointError) as refused:
        check_folder(Path("broken"))
    return str(refused.value)


def edit(name: str, **fields: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        path = sorted(folder.glob("*.safetensors"))[0]
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return write


def add_file(folder: Path) -> None:
    save_file({"more": torch.zeros(1)}, folder / "model-9.safetensors")


def drop_from_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))


BROKEN = {
    "another class": (edit("config.json", architectures=["LlamaModel"]), r"architectures is \['LlamaModel'\], not"),
    "tokenizer too large": (edit("config.json", vocab_size=100), "tokenizer .* has 4096 tokens, the model only 100"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "wrong  tokenizer"),
    "end beyond": (edit("generation_config.json", eos_token_id=5000), r"eos_token_id \[5000\] beyond 4096"),
    "a layer more": (edit("config.json", num_hidden_layers=5), "missing: model.layers.4"),
    "a layer less": (edit("config.json", num_hidden_layers=3), "not of the family: model.layers.3"),
    "wider": (edit("config.json", intermediate_size=65), "of another shape: model.layers.0.mlp"),
    "said format": (edit("config.json", dtype="bfloat16"), "'F32'.*, and config.json says bfloat16"),
    "two formats": (edit_tensors(lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()})), "'F16', "),
    "stray file": (add_file, "not in the index: more"),
    "stray tensor": (drop_from_index, "not in the index: model.norm.weight"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_check_finds_what_is_wrong(workplace: Path, name: str) -> None:
    change, told = BROKEN[name]
    assert re.search(told, broken(change))


CONVERTER = """import pathlib, struct, sys
folder, _, made, _, number_format = sys.argv[1:]
assert (pathlib.Path(folder) / "config.json").is_file() and number_format == "q8_0"
print("writing\\nthe reason")
{}
"""
WRITES = 'pathlib.Path(made).write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 39, 1))'


def test_llama_cpps_converter_makes_the_only_file(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("llama.cpp").mkdir()
    script = Path("llama.cpp/convert_hf_to_gguf.py")
    script.write_text(CONVERTER.format(WRITES))
    words = ["--gguf", "--gguf_type", "q8_0"]
    export(["model", "one", *words, "--llama_cpp", "llama.cpp"])
    assert [path.name for path in Path("one").iterdir()] == ["one.gguf"]
    assert struct.unpack("<Q", Path("one/one.gguf").read_bytes()[8:16]) == (39,)

    script.chmod(0o755)
    monkeypatch.setenv("PATH", "llama.cpp")
    for wrong in ("sys.exit(3)", "pass", 'pathlib.Path(made).write_bytes(b"GGML" + bytes(range(40)))'):
        script.write_text(CONVERTER.format(wrong))
        with pytest.raises(CheckpointError, match="has made no GGUF file .*\n.*\nthe reason"):
            export(["model", "two", *words])
    script.unlink()
    for more, told in (([], "not on the PATH"), (["--llama_cpp", "nowhere"], "not in nowhere")):
        with pytest.raises(ConfigError, match=f"{told}.*git clone"):
            export(["model", "two", *words, *more])
    assert left(workplace) == {"model", "data.jsonl", "llama.cpp", "one"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("model taken", "is in use"),
        ("model new --merge", "leave --merge out"),
        ("model new --base model", "no adapter"),
        ("model new --gguf_type f16", "no effect without `--gguf`"),
        ("no/thing/here new", "there is no folder"),
        ("taken new", "neither a Hugging Face model"),
    ],
)
def test_a_wrong_command_is_one_message_and_writes_nothing(workplace: Path, words: str, told: str) -> None:
    Path("taken").mkdir()
    Path("taken/notes").touch()
    with pytest.raises(MobiusError, match=told):
        export(words.split())
    assert left(workplace) == {"model", "data.jsonl", "taken"}


def test_what_does_not_fit_is_refused(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(Path("own"), num_layers=1)
    edit_tensors(lambda tensors: next(iter(tensors.values())).fill_(1e5))(Path("own"))
    with pytest.raises(CheckpointError, match="too large for torch.float16"):
        export(["own", "half", "--dtype", "fp16"])
    monkeypatch.setattr("mobius.hardware.host_memory.available_host_bytes", lambda: 1000)
    with pytest.raises(HostMemoryError, match="--one_file"):
        export(["own", "half", "--one_file"])
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="1000 bytes is free"):
        export(["own", "half"])
    assert left(workplace) == {"model", "data.jsonl", "own"}
