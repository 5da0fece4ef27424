"""A model is found, or the message says where it was looked for; shape options shape what has no weights yet."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from harness.pipelines import CPU, FAMILIES
from safetensors.torch import save_file
from transformers import PretrainedConfig

from mobius.config.config import ModelConfig
from mobius.errors import CheckpointError, ConfigError
from mobius.models import families
from mobius.models.blocks import ModelParts
from mobius.models.families import load_model_config, load_planned_config, locate_model
from mobius.models.weights import EMBEDDING_WEIGHT, LM_HEAD_WEIGHT


def write_config(folder: Path, config: PretrainedConfig, *, has_weights: bool) -> Path:
    """A model folder as far as the configuration is concerned: that there are weights is seen by a file's name."""
    config.save_pretrained(folder)
    if has_weights:
        save_file({}, folder / "model.safetensors")
    return folder


def load(folder: Path, **options: int) -> PretrainedConfig:
    return load_model_config(folder, replace(ModelConfig(model_path=str(folder)), **options))  # type: ignore[arg-type]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    write_config(tmp_path / "model", FAMILIES["llama"](), has_weights=False)

    assert locate_model(str(tmp_path / "model")) == tmp_path / "model"


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2.5-14B"}')
    with pytest.raises(
        CheckpointError, match=r"--model_path Qwen/Qwen2.5-14B --use_lora --adapter_path .*/adapter[.] To"
    ):
        locate_model(str(tmp_path / "adapter"))
    with pytest.raises(CheckpointError, match=f"--model_path {tmp_path}: the folder has no config.json"):
        locate_model(str(tmp_path))


@pytest.fixture(params=["offline", "unreachable", "silent"])
def hub_out_of_reach(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The three ways to be without a hub, the last as behind a firewall; gives the cache, which is empty."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(families, "LOOK_UP_SECONDS", 0.2)
    with socket.socket() as server:  # bound, but it never listens: a connection is refused
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        if request.param == "offline":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        elif request.param == "silent":
            server.listen()  # takes connections and never answers
        yield tmp_path / "hub"


@pytest.mark.timeout(20)
def test_a_missing_model_is_told_with_folder_cache_hub_and_the_way_to_get_it_offline(
    tmp_path: Path, hub_out_of_reach: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        locate_model("nobody/nothing")

    for part in (tmp_path / "nobody" / "nothing", hub_out_of_reach, "`hf download nobody/nothing --local-dir MODEL`"):
        assert str(part) in str(caught.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("given", ["outptu", "output/checkpoint-6"])
def test_a_missing_model_is_told_with_the_folder_whose_name_is_like_it(
    given: str, tmp_path: Path, hub_out_of_reach: Path
) -> None:
    (tmp_path / "output" / "checkpoint-9").mkdir(parents=True)
    (tmp_path / "output" / "checkpoint-7.json").touch()
    meant = {"outptu": "output", "output/checkpoint-6": "output/checkpoint-9"}[given]
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / given} (did you mean {meant}?)")):
        locate_model(given)


def test_the_hub_is_asked_once_and_waited_for_no_longer_than_a_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The client's limit is one for each address of the hub, and none for its name."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    asked = list[str]()

    def wait(_: object, name: str, **__: object) -> None:
        asked.append(name)
        time.sleep(30)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", wait)
    monkeypatch.setattr(families, "LOOK_UP_SECONDS", 0.2)
    since = time.monotonic()
    with pytest.raises(CheckpointError, match=r"not found\. .* on the hub \(TimeoutError: no answer in 0\.2 s\)"):
        locate_model("nobody/nothing")
    assert time.monotonic() - since < 5
    assert asked == ["nobody/nothing"]


@pytest.mark.timeout(20)
def test_a_model_in_the_cache_is_found_without_the_hub(hub_out_of_reach: Path) -> None:
    entry, revision = hub_out_of_reach / "models--nobody--nothing", "0" * 40
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(revision)
    (entry / "snapshots" / revision).mkdir(parents=True)
    (entry / "snapshots" / revision / "config.json").write_text("{}")

    assert locate_model("nobody/nothing", with_weights=False) == entry / "snapshots" / revision
    with pytest.raises(CheckpointError, match="nobody/nothing: not found") as told:
        locate_model("nobody/nothing")
    assert "To try Mobius" not in str(told.value)
    (entry / "snapshots" / revision / "model.safetensors").write_bytes(b"")
    assert locate_model("nobody/nothing") == entry / "snapshots" / revision


def test_the_default_model_out_of_reach_is_told_with_what_needs_no_network(hub_out_of_reach: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"To try Mobius without a network: bash train\.sh configs/quickstart\.yaml$"
    ):
        locate_model(ModelConfig().model_path)


@pytest.mark.parametrize("with_weights", [True, False])
def test_weights_are_downloaded_only_where_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_weights: bool
) -> None:
    asked = dict[str, list[str]]()

    def download(model_path: str, allow_patterns: list[str]) -> str:
        asked[model_path] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    assert locate_model("nobody/nothing", with_weights=with_weights) == tmp_path
    assert ("*.safetensors" in asked["nobody/nothing"]) is with_weights
    assert {"*.json", "*.model", "*.jinja"} < set(asked["nobody/nothing"])


def snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch, *, tied: bool, names: list[str]) -> list[bool]:
    """A model of the hub in two files that lists these tensors; gives, for each download, whether it was of weights."""
    asked, files = list[bool](), ["1.safetensors", "2.safetensors"]
    config = FAMILIES["llama"]()
    config.tie_word_embeddings = tied
    write_config(folder, config, has_weights=False)
    listed = {name: files[number % 2] for number, name in enumerate(names)}
    index = {"metadata": {"total_size": 3 * 2**30}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def fetch(model_path: str, with_weights: bool) -> Path:
        asked.append(with_weights)
        if with_weights:
            for file in files:
                values = {
                    name: torch.full((4, 4), float(name == LM_HEAD_WEIGHT)) for name in listed if listed[name] == file
                }
                save_file(values, folder / file)
        return folder

    monkeypatch.setattr(families, "_fetch", fetch)
    return asked


@pytest.mark.parametrize(
    ("tied", "names", "is_downloaded"),
    [
        (False, [EMBEDDING_WEIGHT, "model.norm.weight", LM_HEAD_WEIGHT], False),
        (True, [EMBEDDING_WEIGHT, "model.norm.weight"], False),
        (
            True,
            [EMBEDDING_WEIGHT, "model.norm.weight", LM_HEAD_WEIGHT],
            True,
        ),  # one matrix or two: only the values tell
    ],
)
def test_a_plan_for_a_model_of_the_hub_goes_by_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, names: list[str], is_downloaded: bool
) -> None:
    asked = snapshot(tmp_path, monkeypatch, tied=tied, names=names)
    planned = load_planned_config(ModelConfig(model_path="nobody/nothing", num_layers=7))
    assert asked == [False, True][: 1 + is_downloaded]
    assert planned.undownloaded_bytes == (0 if is_downloaded else 3 * 2**30)
    assert planned.config.num_hidden_layers == 7
    assert not planned.config.tie_word_embeddings or LM_HEAD_WEIGHT not in names
    with pytest.raises(ConfigError, match=r"--num_layers 13 is more than the 12 layers"):  # as of one that is here
        load_planned_config(ModelConfig(model_path="nobody/nothing", num_layers=13))
    if not is_downloaded:
        locate_model("nobody/nothing")  # by a run
        assert load_planned_config(ModelConfig(model_path="nobody/nothing")).undownloaded_bytes == 0
        (tmp_path / "2.safetensors").unlink()
        assert load_planned_config(ModelConfig(model_path="nobody/nothing")).undownloaded_bytes, "half of a download"


@pytest.mark.parametrize("model_path", ["./models/llama", "/models/llama", "models/my/llama"])
def test_a_path_that_cannot_be_a_hub_id_is_not_advised_to_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_path: str
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(CheckpointError) as caught:
        locate_model(model_path)

    assert str((tmp_path / model_path).absolute()) in str(caught.value)
    assert "hf download" not in str(caught.value)


def test_pickled_files_beside_safetensors_do_not_matter(tmp_path: Path) -> None:
    write_config(tmp_path, FAMILIES["llama"](), has_weights=True)
    (tmp_path / "training_args.bin").touch()

    assert load(tmp_path).model_type == "llama"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_smaller_num_layers_keeps_the_first_layers_of_a_checkpoint_and_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    own = FAMILIES[family]()
    write_config(tmp_path, own, has_weights=True)

    config = load(tmp_path, num_layers=7)

    assert config.num_hidden_layers == 7
    assert getattr(config, "layer_types", None) in (None, list(getattr(own, "layer_types", None) or [])[:7])
    assert len(ModelParts(config, CPU).layers) == 7
    (warning,) = warnings_of(caplog)
    assert "--num_layers 7" in warning
    assert "12" in warning


def test_noise_that_a_configuration_asks_for_is_told_to_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = FAMILIES["llama"]()
    write_config(tmp_path / "none", config, has_weights=False)
    load(tmp_path / "none")
    assert not warnings_of(caplog)
    config.attention_dropout = 0.1
    write_config(tmp_path / "some", config, has_weights=False)
    assert load(tmp_path / "some").attention_dropout == 0.1
    (warning,) = warnings_of(caplog)
    assert "some/config.json sets attention_dropout 0.1: training ignores this" in warning


@pytest.mark.parametrize("num_layers", [3, 24])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_num_layers_shapes_a_model_without_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, num_layers: int
) -> None:
    write_config(tmp_path, FAMILIES[family](), has_weights=False)

    config = load(tmp_path, num_layers=num_layers)

    assert len(ModelParts(config, CPU).layers) == num_layers
    assert warnings_of(caplog) == []


def test_more_layers_continue_the_pattern_of_layer_kinds(tmp_path: Path) -> None:
    write_config(tmp_path, FAMILIES["gemma3"](), has_weights=False)

    kinds = load(tmp_path, num_layers=20).layer_types

    assert [number for number, kind in enumerate(kinds) if kind == "full_attention"] == [5, 11, 17]


@pytest.mark.parametrize(
    ("options", "field", "own"),
    [
        ({"embedding_dim": 64}, "hidden_size", 32),
        ({"ff_dim": 96}, "intermediate_size", 48),
        ({"num_heads": 8}, "num_attention_heads", 4),
        ({"embedding_dim": 32, "ff_dim": 48, "num_heads": 4, "num_layers": 12}, "hidden_size", 32),  # the checkpoint's
    ],
)
def test_another_shape_beside_weights_is_one_warning_and_the_checkpoint_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, int], field: str, own: int
) -> None:
    write_config(tmp_path, FAMILIES["llama"](), has_weights=True)

    config = load(tmp_path, **options)

    assert getattr(config, field) == own
    warnings = warnings_of(caplog)
    assert len(warnings) == (1 if len(options) == 1 else 0)
    assert all(f"--{name} {value}" in text and str(own) in text for text in warnings for name, value in options.items())


QUERIES, KEYS, UP = "self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.up_proj.weight"
WIDTHS: list[tuple[str, dict[str, int], dict[str, int], dict[str, tuple[int, int]]]] = [
    # 8 heads of 64 / 8 = 8 for the queries, the model's own 2 for keys and values.
    (
        "llama",
        {},
        {"num_layers": 2, "embedding_dim": 64, "ff_dim": 80, "num_heads": 8},
        {
            QUERIES: (64, 64),
            KEYS: (16, 64),
            "self_attn.v_proj.weight": (16, 64),
            "self_attn.o_proj.weight": (64, 64),
            "mlp.gate_proj.weight": (80, 64),
            UP: (80, 64),
            "mlp.down_proj.weight": (64, 80),
        },
    ),
    # A width of its own of a head stays.
    ("llama", {"head_dim": 16}, {"ff_dim": 96}, {QUERIES: (64, 32), UP: (96, 32)}),
    # Every head has its own keys and values.
    ("llama", {"num_key_value_heads": 4}, {"num_heads": 2}, {KEYS: (32, 32)}),
    # 60 does not divide by the model's own 8 heads, but by the 6 that are asked for with it.
    *(
        (family, {"num_attention_heads": 8}, {"embedding_dim": 60, "num_heads": 6}, {QUERIES: (60, 60), KEYS: (20, 60)})
        for family in ("llama", "mistral", "qwen2")
    ),
]


@pytest.mark.parametrize(("family", "fields", "options", "shapes"), WIDTHS)
def test_shape_options_shape_a_model_without_weights(
    tmp_path: Path,
    family: str,
    fields: dict[str, int],
    options: dict[str, int],
    shapes: dict[str, tuple[int, int]],
) -> None:
    config = FAMILIES[family]()
    for name, value in fields.items():
        setattr(config, name, value)
    write_config(tmp_path, config, has_weights=False)

    layers = ModelParts(load(tmp_path, **options), CPU).layers

    assert len(layers) == options.get("num_layers", config.num_hidden_layers)
    assert {name: layers[1].shapes[name] for name in shapes} == shapes
