"""Whole runs with adapters: what they leave, what loads it, what it is merged into, and what goes on from it."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from harness.adapted_models import adapt_by_peft
from harness.grids import named
from harness.rounding import assert_near_after_adam, reordered
from harness.runs import assert_equal_tensors, make_checkpoint, steps_of, tensors_of
from harness.sessions import resume
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from mobius.commands import run_command
from mobius.config.config import AdapterConfig, FinetuningType
from mobius.errors import CheckpointError, ConfigError, MobiusError
from mobius.models.peft_folder import AdapterFolder
from mobius.training.evaluation.generation import TextGenerator

Run = Callable[..., None]
SAVES = "--save_steps 3 --save_total_limit 0"
LORA = f"--use_lora --lora_rank 4 --learning_rate 2e-2 --warmup_steps 0 --num_iterations 6 {SAVES} --save_params none"
TOKENS = torch.arange(3, 40).reshape(1, -1)


def train(run: Run, *options: str) -> None:
    run(*LORA.split(), *options)


@pytest.fixture
def trained(run: Run, workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The folder `out` of the run of LORA, which is trained once for all tests."""
    adapter = tmp_path_factory.getbasetemp() / "trained adapter"
    if not adapter.exists():
        train(run)
        shutil.copytree("out", adapter)
    else:
        shutil.copytree(adapter, "out")


def base_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained("model", dtype=dtype)


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


MIXED = """--use_dora --use_rslora --lora_dropout 0.1 --lora_target q_proj,up_proj
    --lora_rank_pattern q_proj=2,layers.1.*=3 --lora_alpha_pattern up_proj=5.5
    --additional_target norms,head,down_proj,layers.0.mlp.gate_proj"""


@pytest.mark.parametrize("options", ["", MIXED])
def test_peft_loads_what_is_trained_and_merges_it_to_what_merge_writes(
    run: Run, workplace: Path, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run, "--merge", *options.split())
    adapted = PeftModel.from_pretrained(base_model(), "out")
    by_name = AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained("out/merged", dtype=torch.float32)
    expected = logits_of(adapted)

    assert (expected - logits_of(base_model())).abs().max() > 1e-2, "nothing was learned"
    if not options:  # transformers 5.24 does not find the magnitudes of DoRA, also not in peft's own folders
        assert torch.equal(logits_of(by_name), expected)
    assert torch.allclose(logits_of(merged), expected, atol=1e-4)
    plain = adapted.merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        assert (value - plain[name]).abs().max() <= 1e-6 * plain[name].abs().max(), name

    chatting = TextGenerator.of_folder(Path("model"), torch.device("cpu"), adapter=AdapterFolder(Path("out")))
    for name, value in chatting.model.state_dict().items():
        assert torch.equal(value, merged.state_dict()[name]), name

    assert run_command("export", ["out", "bf16", "--merge", "--dtype", "bf16"]) == 0
    rounded = load_file("bf16/model.safetensors")
    for name, value in rounded.items():
        assert value.dtype == torch.bfloat16
        assert (value.float() - plain[name]).abs().max() <= 2**-8 * plain[name].abs().max(), name
    assert run_command("export", ["out", "bf16", "--merge"]) == 1
    assert "in use" in capsys.readouterr().err


def test_adapters_of_experts_are_loaded_merged_resumed_and_continued(run: Run, workplace: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
    make_checkpoint(Path("own"), family="qwen3_moe", **sizes)  # peft takes dense layers' gate_proj for one of experts
    ranks = ["--lora_rank_pattern", "experts.down_proj=2,up_proj=3,layers.1.mlp.down_proj=5"]
    train(run, "--model_path", "own", "--lora_target_parameters", "all", *ranks, "--merge", "--num_chunks", "4")
    base = AutoModelForCausalLM.from_pretrained("own")
    adapted = PeftModel.from_pretrained(copy.deepcopy(base), "out")
    by_name, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in ("out", "out/merged"))
    expected = logits_of(adapted)

    assert (expected - logits_of(base)).abs().max() > 1e-2, "nothing was learned"
    assert torch.equal(logits_of(by_name), expected)
    assert torch.allclose(logits_of(merged), expected, atol=1e-4)
    plain = adapted.merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        assert (value - plain[name]).abs().max() <= 1e-6 * plain[name].abs().max(), name
    chatting = TextGenerator.of_folder(Path("own"), torch.device("cpu"), adapter=AdapterFolder(Path("out")))
    assert all(torch.equal(value, merged.state_dict()[name]) for name, value in chatting.model.state_dict().items())
    assert run_command("export", ["out", "again", "--merge"]) == 0
    assert_equal_tensors(Path("again"), Path("out/merged"))
    resume("out/checkpoint-3", "--save_dir", "resumed")
    assert_equal_tensors(Path("resumed"), Path("out"))

    settings = AdapterConfig(FinetuningType.LORA, lora_rank=3, lora_target="none", lora_target_parameters="down_proj")
    adapt_by_peft(base, settings).save_pretrained("theirs")
    for first, names in (("theirs", ["r", "target_modules", "target_parameters"]), ("out", [])):
        still = [
            "--adapter_path",
            first,
            "--learning_rate",
            "1e-30",
            "--num_iterations",
            "1",
            "--save_dir",
            f"{first}2",
        ]
        run("--use_lora", "--model_path", "own", *still, "--save_results", f"{first}.txt", "--save_params", "none")
        assert_equal_tensors(Path(first), Path(f"{first}2"))
        pair = [json.loads(Path(folder, "adapter_config.json").read_text()) for folder in (first, f"{first}2")]
        assert all(pair[0][name] == pair[1][name] for name in names or pair[0]), first


def test_the_folder_of_an_adapter_has_its_base_and_no_weights_of_it(run: Run, workplace: Path) -> None:
    train(run, "--save_params", "adapter.pt")
    fields = json.loads(Path("out/adapter_config.json").read_text())

    assert fields["base_model_name_or_path"] == str(Path("model").resolve())
    assert (fields["r"], fields["lora_alpha"], fields["peft_type"]) == (4, 16, "LORA")
    stored = load_file("out/adapter_model.safetensors")
    assert all("lora_A" in name or "lora_B" in name for name in stored)
    assert len(stored) == 4 * 7 * 2
    assert sorted(path.name for path in Path("out").glob("*.safetensors")) == ["adapter_model.safetensors"]
    single = torch.load("adapter.pt", weights_only=True)
    assert all(torch.equal(single[name], value) for name, value in stored.items())
    size = sum(path.stat().st_size for path in Path("out/checkpoint-3").glob("*.safetensors"))
    assert size < 5 * Path("out/adapter_model.safetensors").stat().st_size


VARIANTS = {
    "streamed": "",
    "one slot": "--no_prefetch",
    "resident": "--no_offload",
    "DoRA, LoRA+, bf16, one stage resident, not clipped": (
        "--use_dora --loraplus_lr_ratio 4 --dtype bf16 --resident_stages 1 --max_grad_norm 0 --merge"
    ),
    "fp16": "--dtype fp16",
    "DoRA, dropout, rounds, packed": "--use_dora --lora_dropout 0.1 --num_rounds 2 --num_stages 4 --seq_length 64",
}


@pytest.mark.parametrize("options", named(VARIANTS, on_demand=["streamed", "one slot", "resident", "fp16"]))
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(run: Run, workplace: Path, options: str) -> None:
    train(run, *options.split())
    resume("out/checkpoint-3", "--save_dir", "resumed")

    for path in ("adapter_model.safetensors", "checkpoint-6"):
        whole, resumed = (tensors_of(Path(folder, path)) for folder in ("out", "resumed"))
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.usefixtures("trained")
def test_a_run_goes_on_with_other_stages_and_residency(run: Run, workplace: Path) -> None:
    resume("out/checkpoint-3", "--save_dir", "resumed", "--num_stages", "4", "--resident_stages", "2")

    whole, resumed = (load_file(f"{folder}/adapter_model.safetensors") for folder in ("out", "resumed"))
    # The last bit of a product of low rank goes by where its operands lie in memory, on some CPUs: other stages lie
    # elsewhere.
    before = load_file("out/checkpoint-3/adapter_model.safetensors")
    rates = [step["learning_rate"] for step in steps_of(Path("out"))]
    assert_near_after_adam(resumed, whole, before, rates=rates, share=reordered(4 * 16))


@pytest.mark.parametrize("kind", ["", "--use_dora"])
def test_residency_changes_no_bit_of_what_is_trained(run: Run, workplace: Path, kind: str) -> None:
    for number, options in enumerate((kind, f"{kind} --resident_stages 1", f"{kind} --no_offload")):
        own = ["--save_dir", f"out{number}", "--save_results", f"{number}.txt", *options.split()]
        train(run, "--dtype", "bf16", "--num_iterations", "3", *own)
    first, *others = (load_file(f"out{number}/adapter_model.safetensors") for number in range(3))
    assert first["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"].dtype == torch.bfloat16
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items())
    if kind:
        train(run, "--dtype", "bf16", "--num_iterations", "1", "--save_dir", "lora", "--save_results", "lora.txt")
        assert steps_of(Path("lora"))[0]["loss"] == steps_of(Path("out0"))[0]["loss"], "lengths are those of W at first"
        lengths = {name: value for name, value in first.items() if name.endswith("lora_magnitude_vector")}
        assert len(lengths) == 4 * 7
        assert all(value.dtype is torch.float32 for value in lengths.values())


def test_an_adapter_is_trained_on_with_its_own_options(run: Run, workplace: Path) -> None:
    train(run, "--num_iterations", "1", *MIXED.split())
    more = ["--adapter_path", "out", "--save_dir", "more", "--save_results", "more.txt", "--learning_rate", "1e-30"]
    run(*LORA.replace("--lora_rank 4", "").split(), *more)

    configs = [json.loads(Path(folder, "adapter_config.json").read_text()) for folder in ("out", "more")]
    assert configs[0] == configs[1]
    assert configs[0]["alpha_pattern"] == {"up_proj": 5.5}
    assert len(configs[0]["rank_pattern"]) == 4 + 1, "peft saves patterns sorted, but here the order matters"
    assert yaml.safe_load(Path("more/training_args.yaml").read_text())["lora_alpha_pattern"] == {"up_proj": "5.5"}
    before, after = (load_file(f"{folder}/adapter_model.safetensors") for folder in ("out", "more"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_an_adapter_that_peft_saved_is_trained_on_with_its_own_options(run: Run, workplace: Path) -> None:
    settings = AdapterConfig(
        FinetuningType.LORA,
        lora_rank=3,
        lora_alpha=7.5,
        lora_rank_pattern=(("layers.1.*", "2"),),
        lora_target="q_proj,up_proj",
        lora_dropout=0.25,
        use_dora=True,
    )
    adapt_by_peft(base_model(), settings, modules_to_save=["down_proj", "norm"]).save_pretrained("theirs")
    run("--use_lora", "--adapter_path", "theirs", "--learning_rate", "1e-30", "--num_iterations", "1")

    before, after = (load_file(f"{folder}/adapter_model.safetensors") for folder in ("theirs", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    theirs, ours = (json.loads(Path(folder, "adapter_config.json").read_text()) for folder in ("theirs", "out"))
    for name in ("r", "lora_alpha", "rank_pattern", "use_dora", "lora_dropout"):
        assert theirs[name] == ours[name], name


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--lora_rank", "2"], "has lora_rank 4, the run has 2. Leave --lora_rank out"),
        (["--use_rslora"], "use_rslora"),
        (["--use_dora"], "has use_dora false, the run has true"),
        (["--lora_rank_pattern", "q_proj=2"], 'lora_rank_pattern null, the run has {"q_proj": 2.0}'),
        (["--lora_target", "q_proj"], "its targets are"),
        (["--additional_target", "norms"], "its targets are"),
    ],
)
@pytest.mark.usefixtures("trained")
def test_an_adapter_of_another_shape_is_refused(run: Run, workplace: Path, options: list[str], told: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?i){told}"):
        train(run, "--adapter_path", "out", "--save_dir", "more", "--save_results", "more.txt", *options)
    assert not Path("more").exists()


@pytest.mark.usefixtures("trained")
def test_values_of_an_adapter_are_looked_at_like_those_of_a_model(
    run: Run, workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path("out/adapter_model.safetensors")
    tensors = load_file(path)
    name = next(iter(tensors))
    again = ["--adapter_path", "out", "--save_dir", "more", "--save_results", "more.txt", "--num_iterations", "1"]

    for value in (1e6, float("nan")):
        tensors[name][0, 0] = value
        save_file(tensors, path, metadata={"format": "pt"})
        if math.isfinite(value):
            train(run, *again)
            assert any(repr(name) in text and "1e+06" in text for text in caplog.messages)
        else:
            with pytest.raises(CheckpointError, match="1 values that are not finite"):
                train(run, *again, "--overwrite_output_dir")


def test_an_adapter_of_another_base_is_refused(run: Run, workplace: Path) -> None:
    shutil.copytree("model", "own")
    train(run, "--model_path", "own")
    file = next(Path("own").glob("*.safetensors"))
    tensors = {name: value + 1 for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match="trained on other weights"):
        train(run, "--model_path", "own", "--adapter_path", "out", "--save_dir", "b", "--save_results", "b.txt")
    with pytest.raises(CheckpointError, match="trained on other weights"):
        resume("out/checkpoint-3", "--save_dir", "resumed")
    assert run_command("export", ["out", "merged", "--merge"]) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "lacks model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
        ({"bias": "all"}, "bias"),
        ({"r": 0}, "above 0"),
        ({"lora_alpha": "x"}, "above 0"),
    ],
)
@pytest.mark.usefixtures("trained")
def test_an_adapter_of_another_kind_is_refused(run: Run, workplace: Path, change: dict[str, object], told: str) -> None:
    path = Path("out/adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(MobiusError, match=told):
        train(run, "--adapter_path", "out", "--save_dir", "more", "--save_results", "more.txt")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--lora_target", "q_porj"], "did you mean q_proj"),
        (["--lora_target", "lm_head"], "--additional_target"),
        (["--lora_target", ".*attention.*"], "matches no full name"),
        (["--lora_target", "(q_proj"], "not a valid regular expression"),
        (["--lora_rank", "17"], "use at most 16"),
        (["--additional_target", "q_porj"], "did you mean q_proj.*; use embedding, head, norms, or linear layers"),
        (["--additional_target", "up_proj", "--lora_target", "q_proj,up_proj"], "up_proj is also in"),
        (["--lora_rank_pattern", "v_proj=2", "--lora_target", "q_proj"], "v_proj matches no linear layer with"),
    ],
)
def test_a_target_that_cannot_be_is_refused(run: Run, workplace: Path, options: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        train(run, *options)
    assert not Path("out").exists()


def test_merge_into_a_folder_in_use_is_refused_before_training(run: Run, workplace: Path) -> None:
    Path("out/merged").mkdir(parents=True)
    Path("out/merged/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="merged is in use"):
        train(run, "--merge")
    assert Path("out/merged/notes.txt").read_text() == "mine"


def test_room_for_the_merged_model_is_looked_for_before_training(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = sum(parameter.nbytes for parameter in base_model().parameters())
    usage = shutil.disk_usage(".")._replace(free=base)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setitem(globals(), "LORA", LORA.replace(SAVES, "--save_strategy no"))  # checkpoints need more
    with pytest.raises(CheckpointError, match="--save_dir need 1.* MiB in .*, 1.* MiB is free"):
        train(run, "--merge")
    assert not list(Path().glob("out*"))
    train(run, "--num_iterations", "1")  # adapters alone have room


def test_an_evaluation_is_that_of_the_merged_model(run: Run, workplace: Path) -> None:
    evaluation = ["--do_eval", "--val_size", "4"]
    train(run, "--merge", "--num_iterations", "2", *evaluation)
    run("--no_do_train", *evaluation, "--model_path", "out/merged", "--save_dir", "judged", "--save_params", "none")
    losses = [json.loads(Path(folder, "eval_results.json").read_text())["eval_loss"] for folder in ("out", "judged")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_answers_are_those_of_the_merged_model(run: Run, workplace: Path) -> None:
    train(run, "--merge", "--do_predict", "--val_size", "2", "--max_new_tokens", "2", "--num_iterations", "1")
    assert Path("out/generated_predictions.jsonl").is_file()


def test_frozen_parts_stay_as_they_were_and_the_run_goes_on_to_the_bit(run: Run, workplace: Path) -> None:
    options = LORA.replace("--use_lora --lora_rank 4", "--freeze embedding,layers.0-1").split()
    run(*options)
    resume("out/checkpoint-3", "--save_dir", "resumed")

    before, after, resumed = (tensors_of(Path(folder)) for folder in ("model", "out", "resumed"))
    for name, value in after.items():
        is_frozen = name.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.1."))
        assert torch.equal(value, before[name]) == is_frozen, name
        assert torch.equal(value, resumed[name]), name
