"""Parts that the peers with peft's adapters share: options, and the model with its loss.

Adapters are as peft makes them, beside every linear layer but the head. microbatch_search.py chooses the microbatch.
"""

import argparse
from typing import Any

import torch
from peer import STANDARD_DEVIATION, make_parser, read_config
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel


def make_lora_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every peer with adapters has."""
    parser = make_parser(description)
    parser.add_argument("--lora_rank", type=int, default=8)
    parser.add_argument("--lora_alpha", type=int, default=16)
    parser.add_argument("--rows_per_microbatch", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="those to try")
    parser.add_argument(
        "--loss_chunk_tokens",
        type=int,
        default=0,
        help="tokens whose logits exist at one time; 0: all of a microbatch's, as transformers computes the loss",
    )
    return parser


class ModelWithLoss(nn.Module):
    """A causal language model that answers with its loss, computed in chunks if told."""

    def __init__(self, model: PreTrainedModel, loss_chunk_tokens: int = 0) -> None:
        """`model` may have adapters."""
        super().__init__()
        self.model: Any = model
        self._chunk_tokens = loss_chunk_tokens

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of the next tokens of [rows, length]."""
        if not self._chunk_tokens:
            whole: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            return whole
        hidden = self.model.model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
        labels = tokens[:, 1:].flatten()
        parts = zip(hidden.split(self._chunk_tokens), labels.split(self._chunk_tokens), strict=True)
        losses = [checkpoint(self._sum_of_losses, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / len(labels)

    def _sum_of_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model.lm_head(hidden).float(), labels, reduction="sum")


def adapt(model: PreTrainedModel, arguments: argparse.Namespace, *, has_fp32_adapters: bool) -> ModelWithLoss:
    """Freeze `model`, put adapters into it, and let backward recompute its layers; its loss is computed beside it.

    peft makes adapters in fp32 unless told to leave them in the base's format.
    """
    settings = LoraConfig(
        r=arguments.lora_rank, lora_alpha=arguments.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted: Any = get_peft_model(model, settings, autocast_adapter_dtype=has_fp32_adapters).get_base_model()
    adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted.train()
    return ModelWithLoss(adapted, arguments.loss_chunk_tokens)


def update(optimizer: torch.optim.Optimizer, max_grad_norm: float) -> None:
    """Clip the gradients of what `optimizer` trains if `max_grad_norm` is above 0, update it, and drop them."""
    if max_grad_norm > 0:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


def make_base(config: PretrainedConfig) -> PreTrainedModel:
    """The bf16 model, made on the device that a context around the call says."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    return model


def read_base_config(arguments: argparse.Namespace) -> PretrainedConfig:
    """The base's configuration, with torch's fused attention."""
    config = read_config(arguments.folder)
    config._attn_implementation = "sdpa"
    return config


@torch.no_grad()
def fill_adapters(model: nn.Module) -> None:
    """Give the adapters' first matrices small random values and their second ones zeros, as peft does."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if "lora_A" in name and local.numel() > 0:
            local.normal_(0, STANDARD_DEVIATION)
        elif "lora_B" in name:
            local.zero_()
