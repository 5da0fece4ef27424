import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

TEXTS = ["def f(x):\n\treturn x", "  two  spaces ", "Grüße, 世界 🎉", "a\r\nb", "", "Return the list."]


def records(assets: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (assets / "docstrings" / "train.jsonl").read_text("utf-8").splitlines()]


def test_the_tokenizer_gives_back_every_text(tokenizer: PreTrainedTokenizerBase, assets: Path) -> None:
    corpus = [record["input"] for record in records(assets)[::50]]
    for text in TEXTS + corpus:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_config_and_tokenizer_belong_together(assets: Path) -> None:
    folder = assets / "tiny-llama"
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == config.vocab_size == 4096
    assert tokenizer.pad_token_id == config.pad_token_id
    assert tokenizer.bos_token_id == config.bos_token_id
    assert tokenizer.eos_token_id == config.eos_token_id
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    assert tokenizer.model_max_length == config.max_position_embeddings


def test_the_readme_of_the_corpus_tells_its_size_and_licence(assets: Path) -> None:
    readme = (assets / "docstrings" / "README.md").read_text("utf-8")
    rows = records(assets)
    counted = re.search(r"(\d+) records, (\d+) characters", readme)
    assert counted is not None
    assert [int(number) for number in counted.groups()] == [
        len(rows),
        sum(len(text) for row in rows for text in row.values()),
    ]
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in readme
    assert "Python Software Foundation; All Rights Reserved" in readme


@pytest.mark.parametrize("pattern", [r"/home/", r"/root/", r"/Users/", r"\w@\w+\.\w", r"(?i)copyright"])
def test_the_corpus_holds_nothing_personal(assets: Path, pattern: str) -> None:
    assert not [row for row in records(assets) if re.search(pattern, json.dumps(row, ensure_ascii=False))]
