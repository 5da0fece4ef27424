"""Prediction: answers of a tiny real model on the CPU, their file, their scores, and what is refused."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness.runs import TOKENIZER, make_checkpoint
from harness.tiny_families import make_family_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from mobius.config.config import DataConfig, DatasetEntry
from mobius.data.datasets import PreparedDataset, prepare_data
from mobius.data.token_store import TokenizedSample
from mobius.errors import CheckpointError, DataError, GpuMemoryError, HostMemoryError
from mobius.training.evaluation import generation
from mobius.training.evaluation.generation import TextGenerator, check_generation_config
from mobius.training.evaluation.prediction import PREDICTIONS_FILE, PromptAndLabel, predict, split_prompts

CPU = torch.device("cpu")
CONTEXT = 24
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [300, 301], [17] * 11, [40, 41, 42, 43], [1999]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers differ from prompt to prompt, with a context of 24 tokens."""
    folder = tmp_path_factory.mktemp("model")
    model: Any = make_checkpoint(folder, num_layers=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12 if parameter.ndim > 1 else 1)
    model.config.max_position_embeddings = CONTEXT
    model.save_pretrained(folder)
    (folder / "model.safetensors.index.json").unlink()
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()
    return folder


def sample(prompt: list[int], answer: list[int]) -> PromptAndLabel:
    return PromptAndLabel(np.array(prompt, dtype=np.int32), np.array(answer, dtype=np.int32))


def samples_of(prompts: list[list[int]]) -> list[PromptAndLabel]:
    return [sample(prompt, [50 + index, 60, 2]) for index, prompt in enumerate(prompts)]


def likeliest(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens by a forward pass over the whole text for each, without a cache or padding."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / PREDICTIONS_FILE).read_text(encoding="utf-8").splitlines()]


def with_settings(folder: Path, copy: Path, **settings: object) -> Path:
    """The same model with another generation_config.json."""
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / "generation_config.json").unlink(missing_ok=True)
    (copy / "generation_config.json").write_text(json.dumps(settings))
    return copy


def arrays(prompts: list[list[int]]) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    return [np.array(prompt, dtype=np.int32) for prompt in prompts]


def test_a_cap_on_scores_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # as before transformers 5.23
    make_family_checkpoint(tmp_path, "gemma2", width=64)
    assert TextGenerator.of_folder(tmp_path, CPU).model.config._attn_implementation == "eager"


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_answers_are_the_likeliest_tokens_whatever_is_answered_beside(folder: Path, batch_size: int) -> None:
    answers = TextGenerator.of_folder(folder, CPU).generate(arrays(PROMPTS), max_new_tokens=6, batch_size=batch_size)

    expected = [likeliest(folder, prompt, 6) for prompt in PROMPTS]
    assert [answer and answer.tokens.tolist() for answer in answers] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_rotary_factors_of_an_answer_do_not_follow_the_longest_prompt(rope_type: str, tmp_path: Path) -> None:
    """Each answer is that of a model which has just been loaded and answers this prompt alone."""
    family, original, context = {"longrope": ("phi3", 16, 64), "dynamic": ("llama", 24, 24)}[rope_type]
    make_family_checkpoint(tmp_path, family, width=64)
    fields = json.loads((tmp_path / "config.json").read_text())
    factors = {"short_factor": [1.0] * 16, "long_factor": [8.0] * 16, "original_max_position_embeddings": original}
    more = factors if rope_type == "longrope" else {"factor": 8.0}
    fields |= {"max_position_embeddings": context, "original_max_position_embeddings": original, "sliding_window": None}
    fields["rope_parameters"] |= {"rope_type": rope_type, **more}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    prompts = [[*range(5, 5 + length)] for length in (3, 9, 14, 17, 22)]

    answers = TextGenerator.of_folder(tmp_path, CPU).generate(arrays(prompts), max_new_tokens=12, batch_size=8)

    for prompt, answer in zip(prompts, answers, strict=True):
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        room = min(12, context - len(prompt))
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=room, do_sample=False, eos_token_id=2)
        assert answer is not None
        assert answer.tokens.tolist() == [token for token in alone[0, len(prompt) :].tolist() if token != 2], prompt


def test_an_answer_ends_at_the_end_tokens_of_folder_and_tokenizer(folder: Path, tmp_path: Path) -> None:
    expected = likeliest(folder, PROMPTS[0], 6)
    end = expected[3]
    assert end not in expected[:3]
    configured = TextGenerator.of_folder(with_settings(folder, tmp_path / "one", eos_token_id=[end, 4000]), CPU)

    (answer,) = configured.generate(arrays(PROMPTS[:1]), max_new_tokens=6, batch_size=1)

    assert configured.eos_token_ids == {end, 4000, 2}
    assert answer is not None
    assert (answer.tokens.tolist(), answer.is_finished) == (expected[:3], True)
    plain = TextGenerator.of_folder(with_settings(folder, tmp_path / "none"), CPU)
    plain.tokenizer.eos_token_id = end
    (answer,) = plain.generate(arrays(PROMPTS[:1]), max_new_tokens=6, batch_size=1)
    assert answer is not None
    assert (answer.tokens.tolist(), answer.is_finished) == (expected[:3], True)


def test_what_a_folder_says_of_sampling_draws_nothing_and_its_other_settings_count(
    folder: Path, tmp_path: Path
) -> None:
    sampling = {"do_sample": True, "temperature": 5.0, "top_p": 0.9, "top_k": 50, "max_length": 4}
    drawing = TextGenerator.of_folder(with_settings(folder, tmp_path / "drawing", **sampling), CPU)
    expected = likeliest(folder, PROMPTS[2], 6)
    suppressing = TextGenerator.of_folder(
        with_settings(folder, tmp_path / "suppressing", suppress_tokens=[expected[0]]), CPU
    )

    (drawn,) = drawing.generate(arrays(PROMPTS[2:3]), max_new_tokens=6, batch_size=1)
    (other,) = suppressing.generate(arrays(PROMPTS[2:3]), max_new_tokens=6, batch_size=1)

    assert drawn is not None
    assert drawn.tokens.tolist() == expected
    assert other is not None
    assert other.tokens[0] != expected[0]


def test_an_answer_ends_with_the_context_and_a_prompt_that_fills_it_gets_none(folder: Path) -> None:
    prompts = [[7] * CONTEXT, [5, 6, 7], list(range(20, 20 + CONTEXT - 2)), [7] * (CONTEXT + 9), []]

    answers = TextGenerator.of_folder(folder, CPU).generate(arrays(prompts), max_new_tokens=6, batch_size=8)

    assert [None if answer is None else len(answer.tokens) for answer in answers] == [None, 6, 2, None, None]
    assert answers[2] is not None
    assert answers[2].tokens.tolist() == likeliest(folder, prompts[2], 2)
    assert not answers[2].is_finished


class ShortOfMemory:
    """The model on a GPU that has room for so many prompts."""

    def __init__(self, model: Any, most: int) -> None:
        self._model, self._most = model, most
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **given: Any) -> Any:
        self.sizes.append(len(given["input_ids"]))
        if self.sizes[-1] > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._model.generate(**given)


def test_where_memory_is_short_fewer_prompts_are_answered_at_once(folder: Path) -> None:
    whole = TextGenerator.of_folder(folder, CPU)
    model = ShortOfMemory(whole.model, most=2)

    answers = TextGenerator(model, whole.tokenizer).generate(arrays(PROMPTS), max_new_tokens=6, batch_size=6)

    assert model.sizes == [6, 3, 1, 1, 1, 1, 1, 1, 1]
    assert [answer and answer.tokens.tolist() for answer in answers] == [likeliest(folder, p, 6) for p in PROMPTS]
    with pytest.raises(GpuMemoryError, match=r"a prompt of 11 tokens with up to 6 tokens. Lower --max_new_tokens"):
        TextGenerator(ShortOfMemory(whole.model, most=0), whole.tokenizer).generate(
            arrays(PROMPTS), max_new_tokens=6, batch_size=6
        )


def test_the_file_has_prompt_answer_and_label_of_each_sample_in_order(folder: Path, tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = [[1, 300, 301], *PROMPTS[:3], [7] * CONTEXT]

    numbers = predict(
        folder, samples_of(prompts), output=tmp_path / "new" / "out", max_new_tokens=5, device=CPU, batch_size=2
    )

    found = lines(tmp_path / "new" / "out")
    assert [line["label"] for line in found] == [tokenizer.decode([50 + index, 60]) for index in range(5)]
    assert [line["prompt"] for line in found] == [tokenizer.decode(prompt) for prompt in prompts]
    assert found[0]["prompt"].startswith("<|begin|>")
    assert [line["predict"] for line in found[:4]] == [
        tokenizer.decode(likeliest(folder, prompt, 5), skip_special_tokens=True) for prompt in prompts[:4]
    ]
    assert [list(line) for line in found] == [["prompt", "predict", "label"]] * 4 + [
        ["prompt", "predict", "label", "skipped"]
    ]
    assert (found[4]["predict"], found[4]["skipped"]) == ("", True)
    assert (numbers["num_samples"], numbers["num_skipped"], numbers["num_unfinished"]) == (4, 1, 4)
    assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == [PREDICTIONS_FILE]
    assert all(type(value) in (int, float) for value in numbers.values())


def test_the_models_own_answers_score_all_that_there_is(folder: Path, tmp_path: Path) -> None:
    own = [sample(prompt, [*likeliest(folder, prompt, 5), 2]) for prompt in PROMPTS]
    wrong = sample([5, 6, 7], [90, 91, 92, 93, 2])

    right = predict(folder, own, output=tmp_path, max_new_tokens=5, device=CPU)
    partly = predict(folder, [*own, wrong], output=tmp_path, max_new_tokens=5, device=CPU)

    assert right["exact_match"] == 100
    assert partly["exact_match"] == pytest.approx(100 * 7 / 8)
    assert len(lines(tmp_path)) == 8


def test_labels_that_are_cut_or_empty_are_counted_and_break_nothing(folder: Path, tmp_path: Path) -> None:
    given = [sample([5, 6], [50, 60]), sample([8], [2]), sample([9], [50, 2])]

    numbers = predict(folder, given, output=tmp_path, max_new_tokens=4, device=CPU)

    assert numbers["num_cut_labels"] == 1
    assert [line["label"] == "" for line in lines(tmp_path)] == [False, True, False]


def test_chinese_labels_are_written_as_they_are_and_scored_by_character(folder: Path, tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    given = sample([5, 6], [*tokenizer("今天天气很好。", add_special_tokens=False).input_ids, 2])

    numbers = predict(folder, [given], output=tmp_path, max_new_tokens=4, device=CPU)

    assert "今天天气很好。" in (tmp_path / PREDICTIONS_FILE).read_text(encoding="utf-8")
    assert {"bleu-4-by-character", "rouge-l-by-character"} < set(numbers)


def test_marks_that_some_readers_take_for_the_end_of_a_line_end_none(folder: Path, tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    label = '一\u2028二\u2029三\x85四\n"五\\'
    given = sample([5, 6], [*tokenizer(label, add_special_tokens=False).input_ids, 2])

    predict(folder, [given, given], output=tmp_path, max_new_tokens=4, device=CPU)

    assert [line["label"] for line in lines(tmp_path)] == [label, label]


def prepared(tmp_path: Path, records: list[dict[str, Any]]) -> PreparedDataset:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    config = DataConfig(dataset=(DatasetEntry(str(path)),), seq_length=128, preprocessing_num_workers=1)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    return prepare_data(config, tokenizer, cache_dir=tmp_path / "cache").training[0]


def test_a_conversation_is_answered_at_its_end(tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
    turns = [("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("assistant", "2 it is")]
    messages = [{"role": role, "content": content} for role, content in turns]
    dataset = prepared(tmp_path, [{"messages": messages}])

    (parted,) = split_prompts(dataset, [0], max_samples=None)

    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(parted.prompt) == prompt
    assert tokenizer.decode(parted.label) == "2 it is<|im_end|>"


def test_samples_come_in_the_order_of_their_indices_and_no_more_than_wanted(tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
    dataset = prepared(tmp_path, [{"prompt": f"Say {n}.", "completion": f" {n}"} for n in range(5)])

    chosen = split_prompts(dataset, np.array([4, 0, 2]), max_samples=2)

    texts = [tokenizer.decode(each.prompt, skip_special_tokens=True) for each in chosen]
    assert texts == ["Say 4.", "Say 0."]
    assert [tokenizer.decode(each.label) for each in chosen] == [" 4<|im_end|>", " 0<|im_end|>"]
    assert np.shares_memory(chosen[0].prompt, dataset.tokenized.input_ids)


def test_what_stands_behind_the_last_target_belongs_to_neither() -> None:
    ids, mask = np.arange(4, 11, dtype=np.int32), np.array([0, 0, 1, 0, 1, 1, 0], dtype=np.bool_)

    parted = PromptAndLabel.of_row(TokenizedSample.plain(ids, mask))

    assert (parted.prompt.tolist(), parted.label.tolist()) == ([4, 5, 6, 7], [8, 9])
    alone = PromptAndLabel.of_row(TokenizedSample.plain(ids, np.ones(7, dtype=np.bool_)))
    assert (len(alone.prompt), len(alone.label)) == (0, 7)


def test_plain_text_is_refused(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, [{"text": "Words without a question."}])

    with pytest.raises(DataError, match=r"samples\.jsonl' is plain text.* --eval_dataset .*--do_eval"):
        split_prompts(dataset, [0], max_samples=None)


def test_nothing_to_answer_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no sample to answer; give --eval_dataset"):
        predict(folder, [], output=tmp_path, max_new_tokens=4, device=CPU)
    with pytest.raises(DataError, match=f"none of the 2 samples can be answered.*context of {CONTEXT} tokens"):
        predict(folder, samples_of([[7] * CONTEXT] * 2), output=tmp_path, max_new_tokens=4, device=CPU)


def test_a_folder_that_is_no_model_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="transformers cannot load the model in .*nothing_here"):
        TextGenerator.of_folder(tmp_path / "nothing_here", CPU)


def test_answers_that_cannot_be_written_leave_the_older_ones(folder: Path, tmp_path: Path) -> None:
    (tmp_path / PREDICTIONS_FILE).mkdir()

    with pytest.raises(CheckpointError, match=r"cannot write the answers to .*generated_predictions\.jsonl"):
        predict(folder, samples_of(PROMPTS[:1]), output=tmp_path, max_new_tokens=2, device=CPU)

    assert os.listdir(tmp_path) == [PREDICTIONS_FILE]


def test_a_model_larger_than_the_gpu_answers_on_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = torch.device("cuda", 0)
    num_bytes = (folder / "model.safetensors").stat().st_size
    free = SimpleNamespace(bytes=2 * num_bytes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free.bytes, free.bytes))

    with caplog.at_level(logging.WARNING):
        assert generation._fitting_device(folder, gpu) == gpu
        free.bytes = num_bytes
        assert generation._fitting_device(folder, gpu) == CPU

    assert "the model does not fit into one GPU" in caplog.text
    assert len(caplog.records) == 1


def test_the_optimizers_files_of_a_checkpoint_need_no_memory_to_answer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = (folder / "model.safetensors").stat().st_size
    checkpoint = with_settings(folder, tmp_path / "checkpoint-4")
    (checkpoint / "optimizer-00001-of-00001.safetensors").write_bytes(b"0" * 6 * num_bytes)
    monkeypatch.setattr(generation, "available_host_bytes", lambda: num_bytes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * num_bytes, 2 * num_bytes))
    gpu = torch.device("cuda", 0)

    assert generation._fitting_device(checkpoint, gpu) == gpu
    assert generation._fitting_dtype(checkpoint, SimpleNamespace(dtype=torch.float32), CPU) is torch.float32


def test_on_the_cpu_the_format_is_fp32_where_there_is_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(dtype=torch.bfloat16)
    num_bytes = (folder / "model.safetensors").stat().st_size

    def dtype(free: int, device: str) -> torch.dtype:
        monkeypatch.setattr(generation, "available_host_bytes", lambda: free)
        return generation._fitting_dtype(folder, config, torch.device(device))

    assert dtype(2 * num_bytes, "cpu") is torch.float32
    assert dtype(2 * num_bytes - 2, "cpu") is torch.bfloat16
    assert dtype(2 * num_bytes, "cuda") is torch.bfloat16
    with pytest.raises(HostMemoryError, match="one process loads the model .*omit --do_predict"):
        dtype(num_bytes - 1, "cpu")


@pytest.mark.parametrize(
    "settings",
    [{"output_hidden_states": "a"}, {"bos_token_id": "x"}, {"stop_strings": 5}, {"eos_token_id": 10**30}],
    ids=str,
)
def test_settings_that_no_answer_can_be_made_with_are_refused_before_the_training(
    folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    broken = with_settings(folder, tmp_path / "broken", **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    with pytest.raises(CheckpointError, match=r"broken/generation_config\.json"):
        check_generation_config(broken, tokenizer, 4096)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        TextGenerator.of_folder(broken, CPU).generate(arrays(PROMPTS), max_new_tokens=2, batch_size=3)


def test_settings_of_a_search_that_no_memory_holds_are_refused(folder: Path, tmp_path: Path) -> None:
    wide = with_settings(folder, tmp_path / "wide", num_beams=10**9)

    with pytest.raises(CheckpointError, match="'num_beams' is 1000000000"):
        check_generation_config(wide, AutoTokenizer.from_pretrained(folder), 4096)


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"repetition_penalty": 1.2}], ids=str)
def test_settings_that_answer_are_let_through(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    check_generation_config(
        with_settings(folder, tmp_path / "own", **settings), AutoTokenizer.from_pretrained(folder), 4096
    )
