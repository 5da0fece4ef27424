"""A trained text goes back into the model from which it was taken: all other bytes are those of the base."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.family_checks import tiny_whole
from harness.runs import TOKENIZER
from harness.small_run import Run
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mobius.checkpoint.export_command import export
from mobius.checkpoint.whole_model import WholeModel
from mobius.errors import CheckpointError, ConfigError
from mobius.models.peft_folder import AdapterFolder
from mobius.models.weights import text_weight_names
from mobius.training.evaluation.generation import TextGenerator

PROCESSOR = '{"image_processor_type":   "Any",\n"size": 4}\n'
TOKENS = torch.arange(3, 27).view(2, 12) * 7
OPTIONS = (
    """--model_path whole --packing off --learning_rate 1e-2 --save_steps 3 --save_params none --save_results auto"""
)


def make_base(family: str, *, dtype: torch.dtype = torch.float32, is_tied: bool = False) -> Path:
    """Save a tiny model of `family` as `whole`, in some files, with tensors `mtp.*` and the file of a processor."""
    folder, model = Path("whole"), tiny_whole(family, is_tied=is_tied, vocab_size=4096 + 64).to(dtype)
    model.save_pretrained(folder, max_shard_size="300KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    (folder / "preprocessor_config.json").write_text(PROCESSOR)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    last = max(index["weight_map"].values())
    with safe_open(folder / last, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    more = {"mtp.fc.weight": torch.randn(4, 8).to(dtype), "mtp.layers.0.norm.weight": torch.randn(6, dtype=torch.half)}
    save_file(tensors | more, folder / last, metadata={"format": "pt", "by": "a test"})
    index["weight_map"] |= dict.fromkeys(more, last)
    index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in more.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


def files(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern) if path.is_file()}


def heads(folder: Path) -> dict[str, Any]:
    """Header of each file of weights: names, shapes, formats, places."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        found[path.name] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return found


def is_text(name: str, names: dict[str, str]) -> bool:
    return name in names or name == "lm_head.weight" or (not names and name.startswith("model."))


def assert_put_back(folder: Path, text: Path, base: Path) -> None:
    """All that is not text is the base's bytes, all text is that of the model in `text`."""
    found, expected = stored(folder), stored(base)
    trained = {text_weight_names(stored(text)).get(name, name): tensor for name, tensor in stored(text).items()}
    names = text_weight_names(expected)
    assert found.keys() == expected.keys()
    changed = 0
    for name, tensor in expected.items():
        if is_text(name, names):
            own = names.get(name, name)
            assert torch.equal(found[name], trained[own if own in trained else "model.embed_tokens.weight"]), name
            changed += not torch.equal(found[name], tensor.to(found[name].dtype))
        else:
            assert found[name].dtype is tensor.dtype
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert changed > 10


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "gemma4", "qwen2_5_vl"])
def test_a_run_puts_the_text_back_into_the_files_of_the_whole_model(
    run: Run, workplace: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_base(family)
    run(*OPTIONS.split())
    out, text = Path("out"), Path("out/checkpoint-3")
    assert_put_back(out, text, base)
    assert heads(out) == heads(base)
    for name in ("config.json", "model.safetensors.index.json", "preprocessor_config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes(), name
    without_text = [n for n, tensors in heads(base).items() if not any(map(_looks_like_text, tensors))]
    assert all((out / name).read_bytes() == (base / name).read_bytes() for name in without_text)
    alone = logits(AutoModelForCausalLM.from_pretrained(text))
    whole, told = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not told["missing_keys"]
    assert torch.equal(logits(whole), alone)
    if family != "qwen2_5_vl":  # of which transformers has no class for text
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), alone)

    export(["out/checkpoint-3", "again"])
    assert files(Path("again"), "*.safetensors*") == files(out, "*.safetensors*")
    assert (Path("again/config.json")).read_bytes() == (base / "config.json").read_bytes()
    assert "other tensors of" in capsys.readouterr().out
    export(["out", "text", "--export_as", "text", "--dtype", "fp32"])
    assert stored(Path("text")).keys() == stored(text).keys()
    assert all(torch.equal(tensor, stored(text)[name]) for name, tensor in stored(Path("text")).items())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("text")), alone)


def store_head(base: Path, head: torch.Tensor) -> str:
    """Store `head` in the last file of a base that ties it to the embedding; return its name."""
    last, name = max(base.glob("*.safetensors")), "language_model.lm_head.weight"
    index = json.loads((base / "model.safetensors.index.json").read_text())
    save_file(load_file(last) | {name: head}, last, metadata={"format": "pt"})
    index["weight_map"][name] = last.name
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    return name


def test_other_formats_and_a_stored_copy_of_a_tied_head_are_written_too(run: Run, workplace: Path) -> None:
    base = make_base("gemma3", is_tied=True)
    head = store_head(base, stored(base)["language_model.model.embed_tokens.weight"])
    run(*OPTIONS.split(), "--dtype", "bf16")
    out, text = Path("out"), Path("out/checkpoint-3")
    assert_put_back(out, text, base)
    found = stored(out)
    assert torch.equal(found[head], found["language_model.model.embed_tokens.weight"])
    assert found["language_model.model.norm.weight"].dtype is torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    sizes = sum(tensor.nbytes for tensor in found.values())
    assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == sizes
    alone = logits(AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32))
    assert torch.equal(logits(AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)), alone)

    export(["out/checkpoint-3", "masters", "--dtype", "fp32"])  # which fit the base's own places
    assert heads(Path("masters")) == heads(base)
    export(["out", "half", "--dtype", "fp16"])
    assert_put_back(Path("half"), Path("half"), base)
    assert stored(Path("half"))["mtp.fc.weight"].dtype is torch.float32


def test_a_head_that_a_base_calls_tied_but_stores_is_trained_and_told_in_config_json(run: Run, workplace: Path) -> None:
    base = make_base("gemma3", is_tied=True)
    name = store_head(base, torch.randn(4096 + 64, 32) * 0.1)
    run(*OPTIONS.split(), "--save_params", "all.pt")
    fields = json.loads(Path("out/config.json").read_text())
    assert (fields["tie_word_embeddings"], fields["text_config"]["tie_word_embeddings"]) == (False, False)
    before = json.loads((base / "config.json").read_text())
    before["tie_word_embeddings"] = before["text_config"]["tie_word_embeddings"] = False
    assert fields == before
    assert not torch.equal(stored(Path("out"))[name], stored(base)[name])
    alone = logits(AutoModelForCausalLM.from_pretrained("out/checkpoint-3"))
    assert torch.equal(logits(AutoModelForImageTextToText.from_pretrained("out")), alone)
    text = stored(Path("out/checkpoint-3"))
    found = torch.load("all.pt", weights_only=True)
    assert found.keys() == {own for own in text if not own.endswith((".exp_avg", ".exp_avg_sq"))}
    assert all(torch.equal(tensor, text[own]) for own, tensor in found.items())


def test_nothing_half_written_appears_if_the_disk_is_full_or_a_user_interrupts(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_base("qwen3_vl")
    answers = ["--do_predict", "--val_size", "2"]

    def fill_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("mobius.checkpoint.whole_model._copy", fill_disk)
        with pytest.raises(CheckpointError, match=r"cannot write again.export.partial/model.*No space left"):
            export(["whole", "again"])
        with pytest.raises(CheckpointError, match=r"cannot write .*final.partial/model.*No space left"):
            run(*OPTIONS.split(), *answers)
    with monkeypatch.context() as patched:
        patched.setattr("mobius.checkpoint.whole_model._copy", lambda read, write, size: write(bytes(size)))
        with pytest.raises(CheckpointError, match=r"model.*: 'm.*' was not copied as it is in whole/model"):
            export(["whole", "again"])
    with monkeypatch.context() as patched:
        patched.setattr(WholeModel, "check_copied", interrupt)
        with pytest.raises(KeyboardInterrupt):
            export(["whole", "again"])
    assert not [path.name for path in Path().iterdir() if "again" in path.name]
    assert not [*Path("out").glob("model*"), *Path("out").glob("config.json")]
    run(*OPTIONS.split(), *answers, "--resume_from_checkpoint", "out/checkpoint-3")
    assert len(Path("out/generated_predictions.jsonl").read_text().splitlines()) == 2
    assert json.loads(Path("out/config.json").read_text())["model_type"] == "qwen3_vl"


def test_a_plain_model_has_one_layout_and_one_with_more_tensors_than_the_text_keeps_them(
    run: Run, workplace: Path
) -> None:
    for word in ("original", "text"):
        run("--export_as", word, "--save_dir", word, "--save_params", "none", "--save_results", "auto")
    assert files(Path("original"), "*.safetensors*") == files(Path("text"), "*.safetensors*")
    assert (Path("original/config.json")).read_bytes() == (Path("text/config.json")).read_bytes()
    shutil.copytree("model", "whole")
    save_file({"mtp.weight": torch.ones(3)}, "whole/model-more.safetensors", metadata={"format": "pt"})
    index = json.loads(Path("whole/model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.weight"] = "model-more.safetensors"
    Path("whole/model.safetensors.index.json").write_text(json.dumps(index))
    run(*OPTIONS.split())
    assert files(Path("out"), "model-more*") == files(Path("whole"), "model-more*")
    assert heads(Path("out")) == heads(Path("whole"))
    assert_put_back(Path("out"), Path("out/checkpoint-3"), Path("whole"))


def test_a_base_that_moved_or_changed_is_never_half_copied(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base("qwen2_5_vl")
    run(*OPTIONS.split())
    shutil.move(base, "moved")
    with pytest.raises(CheckpointError, match="the base of out/checkpoint-3 .give --base, or --export_as text.*whole"):
        export(["out/checkpoint-3", "again"])
    export(["out/checkpoint-3", "alone", "--export_as", "text"])
    export(["out/checkpoint-3", "again", "--base", "moved"])
    assert files(Path("again"), "*.safetensors*") == files(Path("out"), "*.safetensors*")
    shard = max(Path("moved").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for words in (["--base", "moved"], ["--base", "moved", "--export_as", "original"]):
        with pytest.raises(CheckpointError, match="was taken from .*/whole. with the fingerprint .*this is one with"):
            export(["out/checkpoint-3", "other", *words])
    with pytest.raises(CheckpointError, match=r"--model_path: the text was taken from .*--export_as text"):
        run(
            *OPTIONS.split(),
            "--model_path",
            "moved",
            "--resume_from_checkpoint",
            "out/checkpoint-3",
            "--resume_changes",
            "model_path",
            "--save_dir",
            "o",
        )
    shutil.move("moved", base)  # the same weights as at the start of the next run; they change while it trains
    changed: list[Path] = []

    def change(self: WholeModel) -> None:
        shard = max(self.base.folder.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
        changed.append(shard)
        check(self)

    check = WholeModel.check_unchanged
    monkeypatch.setattr(WholeModel, "check_unchanged", change)
    with pytest.raises(CheckpointError, match=r"no longer the model that was trained.*saved alone.*--base BASE"):
        run(*OPTIONS.split(), "--save_dir", "late")
    assert changed
    with pytest.raises(CheckpointError, match="holds the model that --model_path whole names.*would remove it for a"):
        run(*OPTIONS.split(), "--save_dir", "whole", "--overwrite_output_dir")
    assert stored(Path("late")).keys() == {n for n in stored(base) if is_text(n, {})}
    assert json.loads(Path("late/base_model.json").read_text())["name"] == str(base.resolve())
    assert not {"other", "o"} & {path.name for path in Path().iterdir()}


def test_a_text_that_does_not_fit_its_base_is_saved_alone_or_refused(
    run: Run, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_base("qwen2_5_vl")
    with pytest.raises(ConfigError, match="--export_as original: the text cannot go back .*num_hidden_layers"):
        run(*OPTIONS.split(), "--num_layers", "2", "--export_as", "original")
    run(*OPTIONS.split(), "--num_layers", "2")
    assert json.loads(Path("out/config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert ", left out |" in Path("out/README.md").read_text()
    with pytest.raises(ConfigError, match="--one_file: with --export_as original"):
        export(["whole", "again", "--one_file"])
    quantized = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": quantized}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="its weights are quantized, and trained weights are not"):
        export(["whole", "again", "--export_as", "original"])
    export(["whole", "again"])
    assert json.loads(Path("again/config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


LORA = "--use_lora --lora_rank 4 --merge --learning_rate 1e-1 --additional_target norm"


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gemma3", "--lora_rank_pattern q_proj=2"),
        ("gemma4", ""),
        ("qwen3_vl", "--use_dora"),
        pytest.param("qwen3_5", "", marks=pytest.mark.extended),
    ],
)
def test_peft_loads_adapters_of_a_text_part_into_the_whole_model(
    run: Run, workplace: Path, family: str, more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_base(family)
    run(*OPTIONS.split(), *LORA.split(), *more.split())
    whole = AutoModelForImageTextToText.from_pretrained(base)
    before, merged = logits(whole), logits(AutoModelForImageTextToText.from_pretrained("out/merged"))
    model = PeftModel.from_pretrained(whole, "out")
    adapted = {name for name, _ in model.named_modules() if name.endswith(".lora_A")}
    assert adapted
    assert all("language_model" in name for name in adapted)
    assert (merged - before).abs().max() > 1e-2
    torch.testing.assert_close(logits(model), merged, rtol=1e-4, atol=1e-4)
    names = text_weight_names(stored(base))
    for name, tensor in stored(base).items():
        assert is_text(name, names) or torch.equal(stored(Path("out/merged"))[name], tensor)

    export(["out", "again", "--merge"])
    assert files(Path("again"), "*.safetensors*") == files(Path("out/merged"), "*.safetensors*")
    generator = TextGenerator.of_folder(base, torch.device("cpu"), adapter=AdapterFolder(Path("out")))
    expected = AutoModelForCausalLM.from_pretrained("out/merged") if family != "qwen3_vl" else None
    if expected is not None:
        assert torch.equal(logits(generator.model), logits(expected))
    last = ["--adapter_path", "out", "--save_dir", "next", "--num_iterations", "1", "--use_lora"]
    run(*OPTIONS.split(), *last)
    assert load_file("next/adapter_model.safetensors").keys() == load_file("out/adapter_model.safetensors").keys()


def _looks_like_text(name: str) -> bool:
    return "language_model" in name or name.startswith(("lm_head", "model.layers", "model.embed", "model.norm"))
