"""Compares generated texts with the texts of the data: exact match, BLEU-4, ROUGE-1, ROUGE-2 and ROUGE-L.

sacrebleu computes BLEU, torchmetrics computes ROUGE; both are imported only when scores are computed. A Chinese or
Japanese character counts as a word; if the data's texts have such characters, the names of the scores say so.
"""

from __future__ import annotations

import importlib
import re
import statistics
import unicodedata
from collections.abc import Sequence
from typing import Any, Final

from mobius.errors import ConfigError

_BLEU: Final = "sacrebleu"
_ROUGE: Final = "torchmetrics.functional.text.rouge"
_ROUGE_NAMES: Final = {"rouge-1": "rouge1", "rouge-2": "rouge2", "rouge-l": "rougeL"}
_BY_CHARACTER: Final = "-by-character"

_IDEOGRAPHS: Final = (
    r"\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u3105-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Characters of scripts without spaces between words: Han, kana, bopomofo. Hangul is not included: it has spaces."""
_IDEOGRAPH: Final = re.compile(f"[{_IDEOGRAPHS}]")
_STANDING_ALONE: Final = re.compile(rf"([{_IDEOGRAPHS}\u3000-\u3004\u3008-\u303f\u31c0-\u31ef\uff01-\uff65])")
"""Matches a character of `_IDEOGRAPHS`, or a punctuation mark or full-width form of these scripts."""


def check_scores_installed() -> None:
    """Import the packages of the scores, which takes seconds; raises ConfigError if some are missing or broken."""
    problems = list[str]()
    for module in (_BLEU, _ROUGE):
        package = module.partition(".")[0]
        try:
            importlib.import_module(module)
        except Exception as error:
            problem = f"with a package that is not installed: pip install {package}"
            if not isinstance(error, ModuleNotFoundError) or (error.name or "").partition(".")[0] != package:
                reason = " ".join(str(error).split())
                problem = (
                    f"with {package}, which is installed but cannot be imported ({type(error).__name__}: "
                    f"{reason:.200}): pip install --force-reinstall --no-deps {package}"
                )
            problems.append(f"`--do_predict` scores answers {problem}")
    if problems:
        raise ConfigError(*problems)


def text_scores(predictions: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """Return scores from 0 to 100 by name; needs one prediction for each label, and at least one label.

    `exact_match`  share of predictions that equal their label, after white space around both is removed
    `bleu-4`       BLEU of the corpus, with sacrebleu's default tokens (13a) and exponential smoothing
    `rouge-1` ...  mean F measure of the samples, in lower case, without punctuation and stemming; 0 for a sample whose
                   prediction or label has no word

    If a label has Chinese or Japanese characters, each such character counts as a word, and the names of BLEU and ROUGE
    get an ending: `bleu-4-by-character` and so on.
    """
    assert len(predictions) == len(labels) > 0, "one prediction for each label, and at least one"
    suffix = _BY_CHARACTER if is_by_character(labels) else ""
    bleu: Any = importlib.import_module(_BLEU)
    rouge: Any = importlib.import_module(_ROUGE)
    are_equal = [one.strip() == other.strip() for one, other in zip(predictions, labels, strict=True)]
    corpus = bleu.corpus_bleu(
        [spaced(text) for text in predictions], [[spaced(text) for text in labels]], tokenize="13a", force=True
    )
    rouge_scores = [
        rouge.rouge_score(
            prediction, label, normalizer=spaced, tokenizer=words_of, rouge_keys=tuple(_ROUGE_NAMES.values())
        )
        for prediction, label in zip(predictions, labels, strict=True)
    ]
    scores = {"exact_match": 100 * statistics.fmean(are_equal), f"bleu-4{suffix}": float(corpus.score)}
    for name, key in _ROUGE_NAMES.items():
        scores[name + suffix] = 100 * statistics.fmean(float(each[f"{key}_fmeasure"]) for each in rouge_scores)
    return scores


def is_by_character(labels: Sequence[str]) -> bool:
    """Whether any label has a character that counts as a word."""
    return any(_IDEOGRAPH.search(text) for text in labels)


def spaced(text: str) -> str:
    """Return `text` with spaces around every Chinese and Japanese character and mark."""
    return _STANDING_ALONE.sub(r" \1 ", text)


def words_of(text: str) -> list[str]:
    """Return runs of letters, accents and digits in lower case; for ASCII, the words of ROUGE's reference code.

    The reference code drops all letters outside ASCII, so that every text in Cyrillic would be empty.
    """
    characters = list[str]()
    for character in text.lower():
        category = unicodedata.category(character)
        if category != "Cf":  # skip joiners within words of Persian and Indian scripts
            characters.append(character if category[0] in "LMN" else " ")
    return "".join(characters).split()
