"""scripts/answer.py: where a prompt ends, answers side by side as one by one, and what counts as right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from answer import check, generate, mean_loss, split_row
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

TINY = Path(__file__).parents[3] / "assets" / "tiny-llama"
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=4096, initializer_range=0.3, **shape)).eval()


def test_a_row_is_parted_at_its_first_answer() -> None:
    row = np.array([4, 5, 6, 7, 8, 9], dtype=np.int32), np.array([False, False, True, True, False, True])

    assert split_row(row) == ([4, 5], [6, 7])


def test_a_prompt_gets_the_answer_that_it_gets_alone(model: LlamaForCausalLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY, trust_remote_code=False)

    together = generate(model, tokenizer, PROMPTS, max_new_tokens=6)

    assert together == [generate(model, tokenizer, [prompt], max_new_tokens=6)[0] for prompt in PROMPTS]
    assert len(set(together)) == len(PROMPTS)


def test_the_loss_is_a_mean_over_the_tokens_of_all_answers(model: LlamaForCausalLM) -> None:
    rows = [([5, 6], [7]), ([8], [9, 10, 11])]

    logs = []
    with torch.no_grad():
        for prompt, answer in rows:
            shares = model(torch.tensor([prompt + answer])).logits[0].softmax(-1)
            logs += [-float(shares[len(prompt) + place - 1, token].log()) for place, token in enumerate(answer)]

    assert mean_loss(model, rows) == pytest.approx(sum(logs) / 4, rel=1e-5)


def test_an_answer_is_checked_where_it_can_be() -> None:
    assert check("57 as a sum:", " 50 + 7", " 40 + 17")
    assert not check("57 as a sum:", " 50 + 8", " 40 + 17")
    assert check("Summarize.", "It opens. ", "It opens.")
    assert not check("Summarize.", "It shuts.", "It opens.")
