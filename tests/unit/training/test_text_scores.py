"""Scores of texts, beside values worked out by hand and the libraries' own rules for splitting."""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import pytest
import sacrebleu
from torchmetrics.functional.text.rouge import rouge_score

from mobius.errors import ConfigError
from mobius.training.evaluation.text_scores import (
    check_scores_installed,
    is_by_character,
    spaced,
    text_scores,
    words_of,
)


def test_bleu_is_the_geometric_mean_of_four_precisions_with_a_penalty_for_brevity() -> None:
    # "the cat sat on the mat": 6 of 6 words, 5 of 5 pairs, 4 of 4, 3 of 3 are found; 6 words for 8.
    scores = text_scores(["the cat sat on the mat"], ["the cat sat on the mat all day"])

    assert scores["bleu-4"] == pytest.approx(100 * math.exp(1 - 8 / 6))


def test_bleu_counts_over_the_corpus() -> None:
    # 1-grams: 4 + 3 of 4 + 4; 2-grams: 3 + 2 of 3 + 3; 3-grams: 2 + 1 of 2 + 2; 4-grams: 1 + 0 of 1 + 1.
    scores = text_scores(["a b c d", "a b c x"], ["a b c d", "a b c d"])

    assert scores["bleu-4"] == pytest.approx(100 * (7 / 8 * 5 / 6 * 3 / 4 * 1 / 2) ** 0.25)


def test_rouge_is_a_mean_of_f_measures_over_samples() -> None:
    # Words of the first: 4 of 6 and of 5 in common (police, the, gunman, killed); pairs: "the gunman" of 5 and of 4.
    # The longest common subsequence has 3 words (police the gunman). The second one is its label.
    scores = text_scores(
        ["Police kill, the gunman was killed!", "Yes it is."], ["police killed the gunman today", "yes, it is"]
    )

    assert scores["rouge-1"] == pytest.approx(100 * (2 * 4 / (6 + 5) + 1) / 2)
    assert scores["rouge-2"] == pytest.approx(100 * (2 * 1 / (5 + 4) + 1) / 2)
    assert scores["rouge-l"] == pytest.approx(100 * (2 * 3 / (6 + 5) + 1) / 2)


def test_chinese_is_scored_by_characters_and_the_names_say_so() -> None:
    # 今天天气好 beside 今天天气很好。: all 5 characters of 6 and 3 of 4 pairs of 5; the mark is none for ROUGE.
    scores = text_scores(["今天天气好"], ["今天天气很好。"])

    assert set(scores) == {
        "exact_match",
        *(f"{name}-by-character" for name in ("bleu-4", "rouge-1", "rouge-2", "rouge-l")),
    }
    assert scores["rouge-1-by-character"] == pytest.approx(100 * 2 * 5 / (5 + 6))
    assert scores["rouge-2-by-character"] == pytest.approx(100 * 2 * 3 / (4 + 5))
    assert scores["rouge-l-by-character"] == pytest.approx(100 * 2 * 5 / (5 + 6))
    # 1- to 4-grams: 5 of 5, 3 of 4, 2 of 3, 1 of 2; 5 tokens for 7 with the mark.
    assert scores["bleu-4-by-character"] == pytest.approx(
        100 * math.exp(1 - 7 / 5) * (5 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    )


def test_the_names_go_by_the_data_not_by_what_was_generated() -> None:
    assert "bleu-4" in text_scores(["今天天气好"], ["a fine day today"])
    assert "bleu-4-by-character" in text_scores(["a fine day today"], ["今天天气好"])


@pytest.mark.parametrize(
    ("prediction", "label"),
    [("我们用 GPU 训练模型。", "我们在4张GPU上训练模型,很快。"), ("他说:“你好”!", "他说:“您好”。"), ("无", "有")],
)
def test_chinese_is_split_as_sacrebleu_does_it(prediction: str, label: str) -> None:
    theirs = sacrebleu.corpus_bleu([prediction], [[label]], tokenize="zh").score

    assert text_scores([prediction], [label])["bleu-4-by-character"] == pytest.approx(theirs)


def test_english_is_split_as_rouge_and_bleu_are_reported_elsewhere() -> None:
    prediction, label = "Don't use the `os_name`: it's 3.5x slower - \tsee #12", "Use os.name (3.5x), don't see 12!"

    scores = text_scores([prediction], [label])

    theirs = rouge_score([prediction], [label], rouge_keys=("rouge1", "rouge2", "rougeL"))
    assert scores["rouge-1"] == pytest.approx(100 * float(theirs["rouge1_fmeasure"]))
    assert scores["rouge-2"] == pytest.approx(100 * float(theirs["rouge2_fmeasure"]))
    assert scores["rouge-l"] == pytest.approx(100 * float(theirs["rougeL_fmeasure"]))
    assert scores["rouge-1"] > 0
    assert scores["bleu-4"] == pytest.approx(sacrebleu.corpus_bleu([prediction], [[label]]).score)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Съешь ещё этих булок", ["съешь", "ещё", "этих", "булок"]),
        ("पूर्व प्रधानमन्त्री", ["पूर्व", "प्रधानमन्त्री"]),
        ("می\u200cخواهم", ["میخواهم"]),
        ("Ünïcode_name", ["ünïcode", "name"]),
        ("한국어 문장", ["한국어", "문장"]),
    ],
)
def test_words_of_other_scripts_are_kept_whole(text: str, words: list[str]) -> None:
    assert words_of(spaced(text)) == words
    assert not is_by_character([text])


def test_japanese_is_by_character() -> None:
    assert words_of(spaced("猫がいる。")) == ["猫", "が", "い", "る"]
    assert is_by_character(["", "猫がいる"])


@pytest.mark.parametrize(
    ("prediction", "label"), [("", "a b c d"), ("a b c d", ""), ("", ""), ("?!", "..."), ("", "好")]
)
def test_texts_without_a_word_score_nothing_and_break_nothing(prediction: str, label: str) -> None:
    scores = text_scores([prediction], [label])

    assert scores.pop("exact_match") == (100 if prediction == label else 0)
    assert set(scores.values()) == {0}


def test_an_exact_match_is_to_the_letter_but_for_white_space_around_it() -> None:
    scores = text_scores([" 42\n", "42", "4 2", "Yes", "no"], ["42", "42 ", "42", "yes", "no"])

    assert scores["exact_match"] == pytest.approx(60)


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_scores_installed()

    def without_rouge(name: str) -> ModuleType:
        if name.startswith("torchmetrics"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="torchmetrics")
        return importlib.__import__(name)

    monkeypatch.setattr("mobius.training.evaluation.text_scores.importlib.import_module", without_rouge)

    with pytest.raises(ConfigError, match=r"^`--do_predict` .*not installed: pip install torchmetrics$"):
        check_scores_installed()


def test_a_package_that_is_broken_is_told_from_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'lxml'", name="lxml")

    monkeypatch.setattr("mobius.training.evaluation.text_scores.importlib.import_module", broken)

    with pytest.raises(ConfigError) as caught:
        check_scores_installed()

    first, second = caught.value.problems
    assert "sacrebleu, which is installed but cannot be imported" in first
    assert "No module named 'lxml'" in first
    assert "--force-reinstall" in second
