"""Prediction: a saved model answers the prompts of evaluation data; the answers are written and scored.

    samples -> answers (generation.py) -> generated_predictions.jsonl -> scores (text_scores.py)

Prediction needs one process and a Hugging Face folder, but no training state.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from mobius.data.datasets import PreparedDataset
from mobius.data.images import ImageFile
from mobius.data.token_store import TokenizedSample
from mobius.errors import CheckpointError, DataError, quoted, reason_of
from mobius.files.atomic_files import atomic_write
from mobius.files.regular_files import read_json
from mobius.models.adapter_kinds import open_adapter
from mobius.reporting.json_lines import json_text
from mobius.training.data import RunData
from mobius.training.evaluation.generation import Generation, TextGenerator, TokenIds
from mobius.training.evaluation.text_scores import is_by_character, text_scores

logger = logging.getLogger(__name__)

PREDICTIONS_FILE: Final = "generated_predictions.jsonl"
_LINE_ENDS: Final = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Escapes of characters that JSON allows in a text, but at which some readers (Python's `splitlines`) end a line."""
BATCH_SIZE: Final = 16
"""Number of prompts in a batch, if memory suffices."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptAndLabel:
    """Sample, split before its last answer; token ids are views of the dataset's arrays."""

    prompt: TokenIds
    """All tokens before the answer, including earlier answers of a conversation."""
    label: TokenIds
    """The answer with its end-of-sequence token; without this token if --seq_length truncated the answer."""
    images: tuple[ImageFile, ...] = ()
    """Images whose tokens the prompt has."""

    @classmethod
    def of_row(cls, row: TokenizedSample) -> PromptAndLabel:
        """Split the first sequence of a row, which has a target; tokens after its last target are dropped.

        Virtual tokens are left out: generation has the prompt itself.
        """
        own = slice(int(np.count_nonzero(row.input_ids[: row.lengths[0]] < 0)), row.lengths[0])
        ids, is_target = row.input_ids[own], row.is_target[own]
        (targets,) = np.nonzero(is_target)
        end = int(targets[-1]) + 1
        (prompt_tokens,) = np.nonzero(~is_target[:end])
        start = int(prompt_tokens[-1]) + 1 if len(prompt_tokens) else 0
        return cls(ids[:start], ids[start:end], row.images)


def split_prompts(
    dataset: PreparedDataset, indices: Iterable[int] | npt.NDArray[np.int64], *, max_samples: int | None
) -> list[PromptAndLabel]:
    """Split the samples of `dataset` at `indices` into prompts and labels, in the order of `indices`.

    Splits at most `max_samples`.

    Raises DataError for plain text, which has no prompts.
    """
    if dataset.is_text:
        raise DataError(
            f"--do_predict: {quoted(dataset.entry.name)} is plain text, which has no prompts to answer. Give data with "
            "prompts and answers by --eval_dataset (prompt and completion, instructions, conversations), or use "
            "--do_eval instead of --do_predict."
        )
    chosen = [int(index) for index in indices][:max_samples]
    return [PromptAndLabel.of_row(dataset.tokenized.sample(index)) for index in chosen]


def prediction_samples(data: RunData) -> list[PromptAndLabel]:
    """Return the samples of all evaluation datasets for which the model generates answers. Raises DataError."""
    max_samples = data.config.evaluation.max_predict_samples
    parts = (split_prompts(*part, max_samples=max_samples) for part in data.evaluation_parts())
    return [sample for part in parts for sample in part]


def predict_and_report(
    folder: Path,
    samples: Sequence[PromptAndLabel],
    *,
    output: Path,
    max_new_tokens: int,
    device: torch.device,
    prompt_folder: Path | None = None,
) -> None:
    """Generate answers to `samples`; write and log the scores of the answers. Arguments as in `predict`."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    numbers = predict(
        folder,
        samples,
        output=output,
        max_new_tokens=max_new_tokens,
        device=device,
        prompt_folder=prompt_folder,
        show_progress=True,
    )
    named = {f"predict_{name}": value for name, value in numbers.items()}
    everything = output / "all_results.json"
    try:
        before = read_json(everything) if everything.is_file() else {}
        for path, values in ((output / "predict_results.json", named), (everything, {**before, **named})):
            with atomic_write(path) as temporary:
                temporary.write_text(json_text(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write the scores to {output}: {reason_of(error)}.") from error
    shown = {name: number for name, number in numbers.items() if name not in ("runtime", "samples_per_second")}
    text = ", ".join(f"{name} {number:.4g}" for name, number in shown.items())
    logger.info("answers to %d samples in %s: %s", len(samples), output, text)


def predict(
    folder: Path,
    samples: Sequence[PromptAndLabel],
    *,
    output: Path,
    max_new_tokens: int,
    device: torch.device,
    prompt_folder: Path | None = None,
    batch_size: int = BATCH_SIZE,
    show_progress: bool = False,
) -> dict[str, float]:
    """Answer `samples` with the model in a Hugging Face folder, with a trained prompt if `prompt_folder` is given.

    Returns scores and counts by name.

    `output`/generated_predictions.jsonl gets a line for each sample, in the order of `samples`: `prompt` (with special
    tokens), `predict`, `label`. A sample whose prompt is empty or fills the model's context is skipped: its line says
    so, and it is counted, but not scored. `text_scores` computes the scores, from 0 to 100. The other numbers are
    `num_samples` (answered), `num_skipped`, `num_unfinished` (generated answers that max_new_tokens or the context
    ended), `num_cut_labels` (labels that --seq_length truncated), `runtime` in seconds (with loading the model),
    `samples_per_second` and `tokens_per_second` (generated).

    Raises DataError if no sample can be answered, CheckpointError for a folder that cannot be read or written,
    HostMemoryError, GpuMemoryError.
    """
    if not samples:
        raise DataError("--do_predict: there is no sample to answer; give --eval_dataset, or a larger --val_size")
    begun = time.perf_counter()
    prompt = None if prompt_folder is None else open_adapter(prompt_folder)
    sees = any(sample.images for sample in samples)
    answerer = TextGenerator.of_folder(folder, device, adapter=prompt, sees=sees)
    answers = answerer.generate(
        [sample.prompt for sample in samples],
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        images=[sample.images for sample in samples],
        show_progress=show_progress,
    )
    seconds = time.perf_counter() - begun
    tokenizer = answerer.tokenizer
    rows = [_texts(sample, answer, tokenizer) for sample, answer in zip(samples, answers, strict=True)]
    _write(output / PREDICTIONS_FILE, rows)
    given = [answer for answer in answers if answer is not None]
    if not given:
        raise DataError(
            f"--do_predict: none of the {len(samples)} samples can be answered: each prompt is empty or fills the "
            f"model's context of {answerer.context_length} tokens. Lower --seq_length, or use shorter prompts."
        )
    num_cut = sum(int(sample.label[-1]) != tokenizer.eos_token_id for sample in samples)
    counts = {
        "num_samples": len(given),
        "num_skipped": len(samples) - len(given),
        "num_unfinished": sum(not answer.is_finished for answer in given),
        "num_cut_labels": num_cut,
    }
    _log_counts(counts, max_new_tokens, output)
    answered = [row for row, answer in zip(rows, answers, strict=True) if answer is not None]
    predictions, labels = ([str(row[name]) for row in answered] for name in ("predict", "label"))
    if is_by_character(labels):
        logger.info("answers have Chinese or Japanese characters: BLEU and ROUGE count each of them as a word")
    return {
        **text_scores(predictions, labels),
        **counts,
        "runtime": seconds,
        "samples_per_second": len(given) / seconds,
        "tokens_per_second": sum(len(answer.tokens) for answer in given) / seconds,
    }


def label_text(sample: PromptAndLabel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sample's answer as text, without special tokens."""
    return text_of(sample.label, tokenizer, is_bare=True)


def text_of(tokens: TokenIds, tokenizer: PreTrainedTokenizerBase, *, is_bare: bool) -> str:
    """Return the text of `tokens`; if `is_bare`, without special tokens."""
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=is_bare, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _texts(
    sample: PromptAndLabel, answer: Generation | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, str | bool]:
    """Return the line of a sample in the output file, as a dict; a sample without an answer has `skipped`."""
    return {
        "prompt": text_of(sample.prompt, tokenizer, is_bare=False),
        "predict": "" if answer is None else text_of(answer.tokens, tokenizer, is_bare=True),
        "label": label_text(sample, tokenizer),
        **({"skipped": True} if answer is None else {}),
    }


def _write(path: Path, rows: Iterable[dict[str, str | bool]]) -> None:
    """Write a line of JSON for each sample, atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False).translate(_LINE_ENDS) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"cannot write the answers to {path}: {reason_of(error)}. Free space or make the folder writable, and "
            "answer again with --no_do_train --do_predict."
        ) from error


def _log_counts(counts: dict[str, int], max_new_tokens: int, output: Path) -> None:
    logger.info("%d samples answered: %s", counts["num_samples"], output / PREDICTIONS_FILE)
    problems = {
        "num_skipped": "samples were skipped: their prompt is empty or fills the model's context",
        "num_unfinished": f"answers were ended by --max_new_tokens {max_new_tokens} or the model's context",
        "num_cut_labels": "answers of the data were truncated to --seq_length; scores compare with the truncated text",
    }
    for name, problem in problems.items():
        if counts[name]:
            logger.warning("%d %s", counts[name], problem)
