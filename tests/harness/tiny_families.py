"""Tiny models of all families: their configurations, the table of those that are checked, and runs that train them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.forked import ROOT, Ranks
from harness.runs import TOKENIZER, environment
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mobius.models.families import plain_attention
from mobius.models.family_support import CheckedFamilies

NUM_LAYERS, WINDOW = 4, 4

FIELDS: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # biases, norms of queries and keys
    **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "qkv_bias"), True),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm"), True),
    # windows
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    # scalings and caps
    "logit_scale": 0.3,
    "embedding_multiplier": 1.7,
    "logits_scaling": 1.3,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "query_pre_attn_scalar": 5,
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": 2.0,
    "mup_enabled": True,
    # projections of low rank, whose values have another width than their keys
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 3),
    "norm_topk_prob": True,
    **dict.fromkeys(("routed_scaling_factor", "moe_routed_scaling_factor", "route_scale"), 1.7),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
}
"""Values of fields by name; a family gets those that its class declares."""

_OLD_NAMES = {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 64, "n_inner": 48, "rotary_dim": 4}
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_KINDS = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
_OF_TWO_KINDS = ("cohere2", "cwm", "exaone4", "gemma2", "ministral", "olmo3", "vaultgemma")
_OF_TWO_WIDTHS = {"layer_types": _KINDS, "head_dim": 4, "global_head_dim": 8}
"""Scores of Gemma 4 have no scale, so wide heads would enlarge the rounding of each layer."""
_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "qwen2_moe": {"mlp_only_layers": [1]},
    "qwen3_moe": {"decoder_sparse_step": 2},
    **dict.fromkeys(("glm", "glm4", "phi", "gpt_neox"), _PARTIAL),
    **{family: {"layer_types": _KINDS} for family in _OF_TWO_KINDS},
    "gemma3_text": {"layer_types": _KINDS, "attn_logit_softcapping": None},
    "cohere_compass_text": {
        "layer_types": _KINDS,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _KINDS[:2]},
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _KINDS, "activation_sparsity_pattern": None},
    "minicpm3": {"dim_model_base": 24},
    "gemma4_text": {
        **_OF_TWO_WIDTHS,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4_unified_text": _OF_TWO_WIDTHS,
    "helium": {"head_dim": 8},
    **{family: {"layer_types": ["conv", "full_attention"] * 2} for family in ("lfm2", "lfm2_moe")},
    "granitemoeshared": {"shared_intermediate_size": 24},
    "olmo": {"clip_qkv": 0.5},
    "phi3": {"sliding_window": WINDOW, "original_max_position_embeddings": 64},
    **dict.fromkeys(("codegen", "gptj"), _OLD_NAMES),
    "smollm3": {"no_rope_layers": [1, 0, 1, 1], "layer_types": None},
}

_VARIANTS: Mapping[str, Mapping[str, Any]] = {"gemma4_text": {"enable_moe_block": True, "top_k_experts": 3}}
"""Family -> fields of a further tiny model: its published models are of two kinds."""


def variants(family: str) -> list[Mapping[str, Any]]:
    """Fields that `tiny_config` gets for each tiny model of `family`."""
    return [{}, *([_VARIANTS[family]] if family in _VARIANTS else [])]


def causal_families() -> list[str]:
    """Families of the installed transformers that have a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def planned_families() -> list[str]:
    """Families among these that declare a pipeline plan."""
    return [family for family in causal_families() if getattr(CONFIG_MAPPING[family], "base_model_pp_plan", None)]


def tiny_config(family: str, **more: Any) -> PretrainedConfig:
    """The tiny configuration of `family`, with whatever else is given."""
    kind = CONFIG_MAPPING[family]
    declared = {field.name for field in dataclasses.fields(kind)}
    fields = {name: value for name, value in FIELDS.items() if name in declared}
    if "kv_lora_rank" in declared:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    config = kind(**fields | dict(_OVERRIDES.get(family, {})) | more)
    config._attn_implementation = plain_attention(config)
    return config


DOCUMENT = "docs/user/families.md"
VERSIONS = Path(__file__).with_name("family_versions.json")
_COLUMNS = 120
_HEAD = """\
# Families

{count} families of causal language models are trained, compared with transformers {version}. `model_type` in a model's
config.json names its family.

Mobius trains any decoder of transformers whose configuration declares a pipeline plan of embedding, layers and norm
(`base_model_pp_plan`), or whose base model has one embedding, one list of layers and one norm. No family has code here;
tables name those whose layers carry a state, and those whose images are read.

A family is supported if its tiny model, with all its features on, gives loss and every gradient of plain transformers:
bit-equal in fp32 on a CPU, on two ranks with two streamed stages each (tied matrices: to 1e-6 of the largest entry).
With packed rows, tiles and slices, gradients are within 2e-6 of the norm. In bf16, the first loss is that of
transformers within 2e-6. Experts are compared with transformers' `grouped_mm`.

Weights that transformers keeps in fp32 in a bf16 model, such as the routers of deepseek_v3 and glm4_moe, are fp32 here,
too: in training, checkpoints and saved models.

`bash scripts/check_families` writes this page and the list that the program reads; with names it only checks those.

- Activations of apertus, arcee, codegen, gptj, jais2, phi and starcoder2, which have two matrices per feed-forward
  part, are estimated some 20 % too low by a dry run; a run on GPUs measures them.
- gemma2 and vaultgemma cap their scores, so rows that are not packed compute all scores of a sequence at once.
- Layers of lfm2, lfm2_moe, olmo_hybrid, qwen3_5_moe_text, qwen3_5_text and qwen3_next that carry a state from token to
  token take packed rows and slices on CPUs only, and not both together; on GPUs, `--packing auto` is refused.
- gemma4_text is compared with and without experts, and trains models without per-layer inputs and without keys shared
  between layers: 31B and 26B-A4B, not E2B and E4B.
- Layers of qwen3_5_text run in transformers' own loop unless its kernels are installed.
- qwen3_5 and qwen3_5_moe are also trained on [images](data.md#images), with a frozen tower; other families on text
  only.
- With transformers 5.17, packed rows and slices of lfm2 and lfm2_moe are refused: their layers pass no documents on.
- transformers 5.17 stores the experts of aria_text in another way: with it, the family is refused.

## Supported

"""
_PARTS = """
## Text parts of larger models

Of a checkpoint that also takes images or sound, the text part is trained and [saved back into
it](results.md#models-that-have-more-than-text), or as a text model. Tiny models of these larger families gave loss and
every gradient of their text part, bit-equal unless stated. Text parts of Qwen2-VL and Qwen3-VL are trained as Qwen2 and
Qwen3, which compute the same for text. By the family of the text part:

"""
_VERSIONS = """
## With other versions of transformers

`bash scripts/check_transformers VERSION` compares all families with that version, in an environment of its own:

"""
_OTHERS = """
## Not supported

Any other family is refused by its name, with the reason. All reasons are under `refused` in
`mobius/models/families.json` and `mobius/models/text_parts.json`. The most frequent ones: learned positions (gpt2,
opt), layers that carry a state (jamba, mamba), an encoder (bart, whisper), or attention that torch's
scaled_dot_product_attention does not run (gpt_oss).
"""
_TRIED = ("packing", "tiles", "slices")


def other_versions() -> dict[str, dict[str, Any]]:
    """Version of transformers -> what `scripts/check_transformers` has found with it."""
    return dict(json.loads(VERSIONS.read_text(encoding="utf-8")))


def written_table(
    checked: CheckedFamilies, parts: Mapping[str, Mapping[str, str]], versions: Mapping[str, Mapping[str, Any]]
) -> str:
    """The page in Markdown."""
    lines, supported = (
        [_HEAD.format(count=len(checked.supported), version=checked.transformers)],
        sorted(checked.supported),
    )
    complete = [family for family in supported if {checked.supported[family][name] for name in _TRIED} == {"yes"}]
    lines += [*_wrapped(f"With packing, tiles and slices: {', '.join(complete)}."), "\n"]
    lines += ["| others | packing | tiles | slices |\n", "|---|---|---|---|\n"]
    notes: list[str] = []
    for family in supported:
        if family not in complete:
            found = checked.supported[family]
            lines.append(f"| {' | '.join([family, *(_cell(found[name], notes) for name in _TRIED)])} |\n")
    lines += ["\n", *(line for number, note in enumerate(notes, 1) for line in _wrapped(f"{number}. {note}"))]
    lines += [_PARTS, *_text_parts(parts)]
    if versions:
        lines += [
            _VERSIONS,
            *(line for version in sorted(versions) for line in _of_version(version, versions[version])),
        ]
    lines.append(_OTHERS)
    return "".join(lines)


def _of_version(version: str, results: Mapping[str, Any]) -> Iterator[str]:
    """How the supported families do with another transformers."""
    text = f"- {version}: {results['num_same']} families and text parts as above"
    if results["unknown"]:
        text += f"; not known to it: {', '.join(results['unknown'])}"
    for family, found in results["different"].items():
        report = ", ".join(f"{name} ({value.partition(' (')[0]})" for name, value in found.items())
        text += f"; otherwise {family}: {report}"
    yield from _wrapped(text)


def _text_parts(parts: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """A list of the text parts that are trained, by their family."""
    by_text: dict[str, list[str]] = {}
    for family, found in parts.items():
        if "parity" in found:
            near = "" if found["parity"] == "bit-equal" else f" ({found['parity']})"
            by_text.setdefault(found["text"], []).append(f"{family}{near}")
    for text, families in sorted(by_text.items()):
        yield from _wrapped(f"- {text}: {', '.join(families)}")


def _cell(found: str, notes: list[str]) -> str:
    """`yes`, or the number of the note that says why not."""
    if found == "yes":
        return found
    if found not in notes:
        notes.append(found)
    return f"no ({notes.index(found) + 1})"


def _wrapped(text: str) -> Iterator[str]:
    indent = "  " if text.startswith("- ") else "   " if text[0].isdigit() else ""
    yield from (f"{line}\n" for line in textwrap.wrap(text, _COLUMNS, subsequent_indent=indent, break_on_hyphens=False))


VOCAB = 4096 + 64
"""Tokens of the quickstart's tokenizer, and those that transformers gives to some families' tokenizers."""
SPREAD = 0.08
"""Standard deviation of what is added to all weights: with those of a fresh model, whose logits are near zero, a wrong
scaling or mask would change the loss too little to be seen."""


def make_family_checkpoint(folder: Path, family: str, *, width: int) -> None:
    """Save a model of `family` of this hidden size with all its features on, with the quickstart's tokenizer.

    Heads are 32 wide and windows 64 tokens; values are drawn with a seed, norms and biases included.
    """
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "moe_intermediate_size": width // 2}
    shape |= {"num_attention_heads": width // 32}
    lengths = {"max_position_embeddings": 1024, "original_max_position_embeddings": 1024, "sliding_window": 64}
    wanted = {**shape, **lengths, "num_key_value_heads": width // 64, "head_dim": 32, "vocab_size": VOCAB}
    own = tiny_config(family)
    by_layer = own.per_layer_attributes or ()
    known = [name for name in wanted if name in by_layer or hasattr(own, name)]
    config = tiny_config(family, **{name: wanted[name] for name in known})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * SPREAD)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def losses_beside_transformers(folder: Path, family: str, options: str, *, width: int = 256) -> Losses:
    """Train a small checkpoint of `family` on the example data by main.py and by scripts/plain_training.py.

    `options` are main.py's; both get all of them, run in bf16 with fp32 masters, and see the same batches. Prints how
    long each of them took.
    """
    make_family_checkpoint(folder / "model", family, width=width)
    data = ROOT / "assets" / "docstrings" / "train.jsonl"
    shared = f"--model_path model --dataset {data} --bf16 {options}".split()
    outputs = ["--save_dir", "out", "--save_params", "p.pt", "--save_results", "r.txt", "--save_strategy", "no"]
    for module, words in (("plain_training", ["--output", "plain.json", *shared]), ("main", [*shared, *outputs])):
        variables, start = environment(folder / "cache"), time.perf_counter()
        ranks = Ranks(module, "main", words, num_ranks=1, folder=folder, environment=variables)
        assert ranks.wait() == 0, f"{module}: {ranks.output()[-3000:]}"
        report = [line for line in ranks.output().splitlines() if line.startswith("time:")]
        print(f"{module}: {time.perf_counter() - start:.0f} s", *report)
    steps = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return Losses([step["loss"] for step in steps], json.loads((folder / "plain.json").read_text()))


class Losses(NamedTuple):
    """Loss of each step; both lists are equally long."""

    run: list[float]
    plain: list[float]

    @property
    def apart(self) -> list[float]:
        """Difference of each step, as a share of the plain loss."""
        return [abs(own / plain - 1) for own, plain in zip(self.run, self.plain, strict=True)]

    @property
    def furthest(self) -> float:
        """Largest difference of a step, as a share of the plain loss."""
        return max(self.apart)

    def __str__(self) -> str:
        """The largest difference, then a line for each step: a test that fails says both, wherever its log is cut."""
        lines = [f"at most {self.furthest:.2e} apart, in step {self.apart.index(self.furthest) + 1}"]
        each = enumerate(zip(self.run, self.plain, self.apart, strict=True), 1)
        lines += [f"  step {step:2}: {own:.5f} plain {plain:.5f}, {apart:.1e}" for step, (own, plain, apart) in each]
        return "\n".join(lines)
