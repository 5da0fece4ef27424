"""Samples rollouts with transformers, and rewards even numbers: one half of the loop in docs/user/rollouts.md.

    python scripts/sample_rollouts.py MODEL ROLLOUTS.jsonl [--seed 1] [--groups 64] [--size 8] [--tokens 12]

Replace the prompts and the reward by your own. vLLM's `LLM.generate` with `SamplingParams(n=8, logprobs=0)` gives the
same lists: token ids of the prompt and of each completion, and the log-probability of each sampled token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Write a line for each rollout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=64, help="number of prompts")
    parser.add_argument("--size", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--tokens", type=int, default=12, help="largest number of tokens of a completion")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, trust_remote_code=False)
    end = tokenizer.eos_token_id
    torch.manual_seed(arguments.seed)
    rewards = []
    with arguments.file.open("w") as rollouts:
        for number in range(arguments.groups):
            prompt = tokenizer(f"Write even numbers, {number}:").input_ids
            sampled = model.generate(
                torch.tensor([prompt] * arguments.size),
                do_sample=True,
                top_k=0,  # Mobius computes log-probabilities without cuts, at temperature 1
                max_new_tokens=arguments.tokens,
                pad_token_id=end,
                output_logits=True,
                return_dict_in_generate=True,
            )
            logps = torch.stack(sampled.logits, 1).float().log_softmax(-1)
            for row, ids in enumerate(sampled.sequences[:, len(prompt) :].tolist()):
                length = ids.index(end) + 1 if end in ids else len(ids)
                rewards.append(sum(token % 2 == 0 for token in ids[:length]) / length)
                record = {
                    "prompt_ids": prompt,
                    "completion_ids": ids[:length],
                    "reward": rewards[-1],
                    "group": number,
                    "logprobs": [float(logps[row, place, token]) for place, token in enumerate(ids[:length])],
                }
                rollouts.write(json.dumps(record) + "\n")
    print(f"{len(rewards)} rollouts, mean reward {sum(rewards) / len(rewards):.3f}")


if __name__ == "__main__":
    main()
