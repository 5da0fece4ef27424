"""Images of records: their tokens, and one message for whatever cannot be used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerBase

from mobius.data.formats import detect_format, parse_record
from mobius.data.images import ImageRules
from mobius.data.tokenization import EncodedSample, SampleEncoder
from mobius.errors import DataError


@pytest.fixture
def encoder(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> SampleEncoder:
    """Encode records; `<image>` of 16 x 24 pixels has 6 tokens."""
    Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save(tmp_path / "a.png")
    tokenizer.add_special_tokens({"additional_special_tokens": [tokenizer.convert_ids_to_tokens(7)]})
    rules = ImageRules(7, str(tokenizer.convert_ids_to_tokens(7)), "(", ")", 4, 2, 64, 4096)
    return SampleEncoder(tokenizer, seq_length=64, images=rules, image_folder=tmp_path)


def encode(encoder: SampleEncoder, *contents: object, **columns: Any) -> EncodedSample:
    roles = "user", "assistant"
    turns = [{"role": roles[number % 2], "content": each} for number, each in enumerate(contents)]
    record = {"messages": turns, **columns}
    return encoder.encode(parse_record(detect_format(record, "here"), record, "here"), "here")


def test_an_image_has_its_tokens_in_its_place_and_no_target(encoder: SampleEncoder) -> None:
    encoded = encode(
        encoder, [{"type": "image"}, {"type": "text", "text": "What is <image>?"}], "an a", images=["a.png"] * 2
    )
    (row,) = encoded.rows
    is_image = row.input_ids == 7
    assert is_image.sum() == 12
    assert [image.grid for image in row.images] == [(1, 4, 6)] * 2
    assert row.images[0].content == row.images[1].content
    assert row.is_target.any()
    assert not (row.is_target & is_image).any()


def test_a_picture_that_a_camera_turned_has_its_turned_size(encoder: SampleEncoder, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save(tmp_path / "turned.jpg", exif=exif)
    (row,) = encode(encoder, "<image>", "a", images=["turned.jpg"]).rows
    assert row.images[0].grid == (1, 6, 4)
    assert row.images[0].open().size == (16, 24)


def test_a_prompt_that_would_lose_an_image_is_left_out(encoder: SampleEncoder) -> None:
    encoded = encode(encoder, "<image>" * 12, "a", images=["a.png"] * 12)
    assert (len(encoded.rows), encoded.is_without_room) == (0, True)
    encoded = encode(encoder, "<image>", "a", "<image>" * 12, "b", images=["a.png"] * 13)
    assert [len(row.images) for row in encoded.rows] == [1], (
        "a later question that does not fit is cut off with its images"
    )
    assert encoded.is_truncated


def broken(folder: Path, name: str) -> None:
    if name == "text.png":
        (folder / name).write_text("no picture")
    elif name == "half.png":
        (folder / name).write_bytes((folder / "a.png").read_bytes()[:20])
    elif name == "large.png":
        Image.new("1", (20_000, 20_000)).save(folder / name)
    elif name == "larger.png":
        Image.new("1", (10_001, 8_000)).save(folder / name)
    elif name == "thin.png":
        Image.new("1", (2000, 2)).save(folder / name)
    elif name == "pipe.png":
        os.mkfifo(folder / name)
    elif name == "folder.png":
        (folder / name).mkdir()


@pytest.mark.parametrize(
    ("content", "images", "told"),
    [
        ("<image>", ["text.png"], "text.png cannot be read: cannot identify image file"),
        ("<image>", ["half.png"], "half.png cannot be read: "),
        ("<image>", ["large.png"], "the image large.png has too many pixels; 80,000,000 are allowed"),
        ("<image>", ["larger.png"], "larger.png has too many pixels of 10,001 x 8,000; 80,000,000 are allowed"),
        ("<image>", ["thin.png"], "thin.png cannot be read: absolute aspect ratio must be smaller than 200"),
        ("<image>", ["pipe.png"], "the image pipe.png is not a file"),
        ("<image>", ["folder.png"], "the image folder.png is not a file"),
        ("<image>", ["none.png"], "none.png: No such file or directory"),
        ("<image>", ["a\0b"], "there is no image"),
        ("<image>", ["https://a.org/a.png"], "the image https://a.org/a.png is an URL; download it"),
        ("<image>", ["data:image/png;base64,AA"], "is an URL; download it"),
        ("<image><image>", ["a.png"], "the messages have 2 <image>, and `images` has 1"),
        ("<image>", ["a.png"] * 2, "the messages have 1 <image>, and `images` has 2"),
        ("<image> {token}", ["a.png"], "which stands for an image; write <image> instead"),
        ("{token}", [], "which stands for an image, and there is no image"),
    ],
)
def test_a_wrong_image_is_told(
    encoder: SampleEncoder, tmp_path: Path, content: str, images: Sequence[str], told: str
) -> None:
    for name in images:
        broken(tmp_path, name)
    rules = encoder._images
    assert isinstance(rules, ImageRules)
    with pytest.raises(DataError) as caught:
        encode(encoder, content.replace("{token}", rules.token), "a", images=images)
    assert str(caught.value).startswith("here: ")
    assert told in str(caught.value)


def test_an_answer_has_no_image(encoder: SampleEncoder) -> None:
    with pytest.raises(DataError, match="an answer has <image>, and a model answers with text"):
        encode(encoder, "a", "<image>", images=["a.png"])


def test_relative_paths_of_a_dataset_of_the_hub_are_refused(encoder: SampleEncoder) -> None:
    with pytest.raises(DataError, match="is a relative path in a dataset of the hub"):
        encode(encoder.with_images_in(None), "<image>", "a", images=["a.png"])


def test_broken_pixels_are_told_when_they_are_decoded(encoder: SampleEncoder, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.png")
    content = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    (row,) = encode(encoder, "<image>", "a", images=["cut.png"]).rows
    with pytest.raises(DataError, match=r"cut.png cannot be read: image file is truncated"):
        row.images[0].open()
