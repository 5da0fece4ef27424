"""Published shapes, built without memory, have their published sizes; parameters of 7B are counted by hand."""

import math

import pytest
import torch
from harness.plan_requests import find_published_shape
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mobius.models import published_shapes
from mobius.models.experts import count_experts
from mobius.models.published_shapes import PUBLISHED_SHAPES, SHORT_NAMES
from mobius.schedule.partition import ModelShape


def test_llama_7b_is_what_was_counted_by_hand() -> None:
    # Attention has 4 matrices, the feed-forward part 3, a layer 2 norms.
    layer, embedding = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096, 32000 * 4096
    assert find_published_shape("7b") == ModelShape(
        embedding_parameters=embedding,
        layer_parameters=(layer,) * 32,
        head_parameters=embedding + 4096,
        hidden_size=4096,
        intermediate_size=11008,
        vocab_size=32000,
        is_tied=False,
        num_heads=32,
        head_size=128,
        num_key_heads=32,
        is_sliceable=True,
    )


# Sizes of the released checkpoints, a tied matrix counted once.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("0.5b", 494_032_768),
        ("0.6b", 596_049_920),
        ("1.5b", 1_543_714_304),
        ("1.7b", 1_720_574_976),
        ("3b", 3_212_749_824),
        ("4b", 4_022_468_096),
        ("7b", 6_738_415_616),
        ("8b", 8_030_261_248),
        ("13b", 13_015_864_320),
        ("14b", 14_770_033_664),
        ("30b", 32_528_943_616),
        ("32b", 32_763_876_352),
        ("70b", 68_976_648_192),
        ("72b", 72_706_203_648),
        ("qwen3-8b", 8_190_735_360),
        ("Qwen3-14B-Base", 14_768_307_200),
        ("Qwen3-32B", 32_762_123_264),
        ("Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Llama-3.2-1B", 1_235_814_400),
        ("Meta-Llama-3-8B-Instruct", 8_030_261_248),
        ("llama3.3-70b-instruct", 70_553_706_496),
        ("Llama-2-7b-chat-hf", 6_738_415_616),
        ("CodeLlama-7b-Instruct-hf", 6_738_546_688),
        ("CodeLlama-13b-hf", 13_016_028_160),
        ("CodeLlama-34b-hf", 33_743_970_304),
        ("open_llama_3b_v2", 3_426_473_600),
        ("TinyLlama-1.1B-Chat-v1.0", 1_100_048_384),
        ("SmolLM-135M", 134_515_008),
        ("SmolLM2-360M-Instruct", 361_821_120),
        ("SmolLM2-1.7B", 1_711_376_384),
        ("SmolLM3-3B-Base", 3_075_098_624),
        ("Mistral-7B-Instruct-v0.1", 7_241_732_096),
        ("Mistral-7B-v0.3", 7_248_023_552),
        ("gemma-2b-it", 2_506_172_416),
        ("gemma-7b", 8_537_680_896),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-2-9b-it", 9_241_705_984),
        ("gemma-3-1b-it", 999_885_952),
        ("gemma-4-31B-it", 30_697_345_280 + 60),  # a stored constant of each layer
        ("google/gemma-4-26B-A4B", 25_233_141_760 + 30),
        ("phi-1_5", 1_418_270_720),
        ("phi-2", 2_779_683_840),
        ("Phi-3-mini-4k-instruct", 3_821_079_552),
        ("Phi-3.5-mini-instruct", 3_821_079_552),
        ("phi-4", 14_659_507_200),
        ("starcoder2-3b", 3_030_371_328),
        ("starcoder2-15b", 15_957_889_024),
        ("pythia-1.4b-deduped", 1_414_647_808),
        ("pythia-12b", 11_846_072_320),
        ("Qwen2-0.5B", 494_032_768),
        ("Qwen2-1.5B-Instruct", 1_543_714_304),
        ("Qwen2-7B", 7_615_616_512),
        ("Qwen3-4B-Instruct-2507", 4_022_468_096),
        ("Apertus-8B-Instruct-2509", 8_053_338_176 + 2 * 32),  # two stored constants of each layer
        ("Olmo-3-7B-Instruct-SFT", 7_298_011_136),
        ("Seed-OSS-36B-Instruct", 36_151_104_512),
        ("DeepCoder-14B-Preview", 14_770_033_664),
        ("TinyLlama_v1.1", 1_100_048_384),
        ("Qwen1.5-MoE-A2.7B", 14_315_784_192),
        ("DeepSeek-V2-Lite", 15_706_484_224),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_known_shapes_have_the_size_of_the_model_they_stand_for(name: str, parameters: int) -> None:
    assert find_published_shape(name).num_parameters == parameters


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("14b", "Qwen/Qwen2.5-14B"),
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("somebody/Llama-3.1-8B", None),
        ("NousResearch/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
        ("Qwen3-8B-FP8", None),
        ("8", None),
    ],
)
def test_a_name_stands_for_the_shape_that_its_publisher_gave_it(name: str, model: str | None) -> None:
    found = published_shapes.find_published_shape(name)
    assert (found and found.model) == model
    if found is not None:
        assert found.is_on_hub == ("/" in name)
        assert found.model in found.describe(name)


# Qwen3-30B-A3B: 128 experts of 3 x 2048 x 768 in each of 48 layers, 8 to a token; Mixtral: 8 of 3 x 4096 x 14336, 2.
@pytest.mark.parametrize(
    ("name", "billions", "number", "num_experts_per_token", "expert"),
    [("qwen3-30b-a3b", 30.5, 128, 8, 3 * 2048 * 768), ("mixtral-8x7b", 46.7, 8, 2, 3 * 4096 * 14336)],
)
def test_known_shapes_with_experts_have_their_published_sizes(
    name: str, billions: float, number: int, num_experts_per_token: int, expert: int
) -> None:
    fields = PUBLISHED_SHAPES[SHORT_NAMES[name]]
    config = CONFIG_MAPPING[str(fields["model_type"])].from_dict(dict(fields))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = [{name: tuple(each.shape) for name, each in layer.named_parameters()} for layer in model.model.layers]
    assert sum(map(math.prod, (each.shape for each in model.parameters()))) == pytest.approx(billions * 1e9, rel=0.002)
    frozen = [[], *[["mlp.experts.down_proj"]] * (len(layers) - 1)]
    found = count_experts(config, layers, frozen)
    assert found is not None
    assert (found.number, found.num_experts_per_token, found.shared_width) == (number, num_experts_per_token, 0)
    assert found.layers == (number * expert,) * len(layers)
    assert found.trained == (number * expert, *[number * expert * 2 // 3] * (len(layers) - 1))


def test_what_all_tokens_take_beside_their_experts_is_none_of_them() -> None:
    config = CONFIG_MAPPING["qwen2_moe"](hidden_size=64, num_experts=4, num_experts_per_tok=2)
    shared = {f"mlp.shared_expert.{each}_proj.weight": (96, 64) for each in ("gate", "up", "down")}
    shapes = {"mlp.experts.gate_up_proj": (4, 64, 64), "mlp.experts.down_proj": (4, 64, 32), "mlp.gate.weight": (4, 64)}
    found = count_experts(config, [shapes | shared, {"mlp.up_proj.weight": (128, 64)}], [[], []])
    assert found is not None
    assert (found.layers, found.shared_width) == ((4 * 3 * 64 * 32, 0), 96)
    assert count_experts(config, [{"mlp.up_proj.weight": (128, 64)}], [[]]) is None
