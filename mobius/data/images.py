"""Images of samples: reads their sizes, and puts their tokens in the places of `<image>`.

    "<image>What is it?"   ->   "<|vision_start|><|image_pad|> ... <|image_pad|><|vision_end|>What is it?"

A file is identified by its content; its pixels are decoded only to compute features, and only if none are stored.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from mobius.errors import DataError, excerpt, first_line, quoted, reason_of
from mobius.files.regular_files import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

MARK: Final = "<image>"
"""Place of an image in a text."""
MOST_PIXELS: Final = 80_000_000
"""Pixels of the largest image that is decoded, to 240 MB."""
_MOST_BYTES: Final = 1 << 30
_ORIENTATION: Final = 0x0112
_TURNED: Final = range(5, 9)
"""Orientations of Exif by which width and height are exchanged."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file with an image as it was when a sample was tokenized."""

    path: str
    content: str
    """Hash of the file's bytes."""
    num_bytes: int
    modified: int
    """Time of the file's last change, in nanoseconds."""
    grid: tuple[int, int, int]
    """Numbers of patches in time (1), from top to bottom, from left to right."""

    def dumps(self) -> bytes:
        """Return a line of JSON."""
        return json.dumps([self.path, self.content, self.num_bytes, self.modified, self.grid]).encode() + b"\n"

    @classmethod
    def loads(cls, line: bytes) -> ImageFile:
        """Return the image that a line describes. Raises ValueError, TypeError."""
        path, content, num_bytes, modified, (time, height, width) = json.loads(line)
        return cls(str(path), str(content), int(num_bytes), int(modified), (int(time), int(height), int(width)))

    def check_unchanged(self) -> None:
        """Raise DataError if the file is gone, or its content is another one."""
        facts = _facts(Path(self.path), self.path)
        if (facts.st_size, facts.st_mtime_ns) == (self.num_bytes, self.modified):
            return
        if _read(Path(self.path), self.path)[0] != self.content:
            raise DataError(
                f"{self.path} has changed since its dataset was tokenized. Give the new image another name "
                "and name it in the dataset"
            )

    def open(self) -> Image:
        """Return the decoded image. Raises DataError."""
        self.check_unchanged()
        from PIL import ImageOps

        with _readable(self.path):
            image = _opened(Path(self.path), self.path)
            return (ImageOps.exif_transpose(image) if _orientation(image) else image).convert("RGB")


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Facts of a model's image processor and tokenizer that decide the tokens of an image."""

    token_id: int
    """Id of the token that stands for features."""
    token: str
    before: str
    """Text before the tokens of an image."""
    after: str
    patch_size: int
    merge_size: int
    """Patches of a token, in height and in width."""
    least_pixels: int
    most_pixels: int
    """Bounds between which an image is resized."""

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the patches of an image of `height` x `width` pixels. Raises ValueError for extreme proportions."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        side = self.patch_size * self.merge_size
        tall, wide = smart_resize(height, width, factor=side, min_pixels=self.least_pixels, max_pixels=self.most_pixels)
        return 1, tall // self.patch_size, wide // self.patch_size

    def num_tokens(self, image: ImageFile) -> int:
        """Return the number of tokens of an image's features."""
        return math.prod(image.grid) // self.merge_size**2

    def text(self, image: ImageFile) -> str:
        """Return the text that stands for an image."""
        return f"{self.before}{self.token * self.num_tokens(image)}{self.after}"

    def read(self, given: str, folder: Path | None) -> ImageFile:
        """Return the image that a record names; relative paths begin at `folder`. Raises DataError without a place."""
        if "://" in given or given.startswith("data:"):
            raise DataError(f"the image {excerpt(given)} is an URL; download it, and give the file's path")
        path = Path(given).expanduser()
        if not path.is_absolute():
            if folder is None:
                raise DataError(
                    f"the image {excerpt(given)} is a relative path in a dataset of the hub; download the dataset and "
                    "its images, and give the folder"
                )
            path = folder / path
        content, facts = _read(path, given)
        with _readable(given), _opened(path, given) as image:
            sides = image.size if _orientation(image) in _TURNED else image.size[::-1]
            grid = self.grid(*sides)
        return ImageFile(str(path.absolute()), content, facts.st_size, facts.st_mtime_ns, grid)


def images_of(record: Mapping[str, object]) -> tuple[str, ...]:
    """Return the paths in the column `images`, or in `image`; () without. Raises DataError."""
    found = [(name, value) for name in ("images", "image") if (value := record.get(name)) not in (None, "", [], ())]
    if len(found) > 1:
        raise DataError("there are both `images` and `image`; leave one of them out")
    for name, value in found:
        each = [value] if isinstance(value, str | Mapping | bytes) else value
        if not isinstance(each, Sequence) or not all(isinstance(path, str) and path for path in each):
            raise DataError(f"`{name}` must be a list of paths of files, not {quoted(value)}; save images as files")
        return tuple(map(str, each))
    return ()


def with_images(texts: Sequence[str], images: Sequence[ImageFile], rules: ImageRules) -> list[str]:
    """Return texts with the tokens of `images` in the places of `MARK`. Raises DataError if numbers differ."""
    number = sum(text.count(MARK) for text in texts)
    if number != len(images):
        raise DataError(
            f"the messages have {number} {MARK}, and `images` has {len(images)}; each image has one place in the text"
        )
    if any(rules.token in text for text in texts):
        raise DataError(f"a message holds {rules.token}, which stands for an image; write {MARK} instead")
    found = iter(images)
    return ["".join(_alternate(text.split(MARK), found, rules)) for text in texts]


def _alternate(parts: Sequence[str], images: Iterator[ImageFile], rules: ImageRules) -> Iterator[str]:
    yield parts[0]
    for part in parts[1:]:
        yield rules.text(next(images))
        yield part


def _facts(path: Path, given: str) -> os.stat_result:
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise DataError(f"the image {excerpt(given, 300)} is not a file")
    except (OSError, ValueError) as error:  # ValueError: an impossible file name
        raise DataError(f"there is no image {excerpt(str(path), 300)}: {reason_of(error)}") from error
    return facts


def _read(path: Path, given: str) -> tuple[str, os.stat_result]:
    """Return the hash of a file's content, and facts of the file. Raises DataError."""
    facts = _facts(path, given)
    if facts.st_size > _MOST_BYTES:
        raise DataError(f"the image {excerpt(given, 300)} has {facts.st_size:,} bytes; {_MOST_BYTES:,} are allowed")
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(cast(Any, file), "sha256").hexdigest(), facts
    except OSError as error:
        raise DataError(f"the image {excerpt(given, 300)} cannot be read: {reason_of(error)}") from error


@contextmanager
def _readable(given: str) -> Iterator[None]:
    """Convert errors of broken images to DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # decoders raise errors of many types
        raise DataError(f"the image {excerpt(given, 300)} cannot be read: {first_line(error)}") from error


def _orientation(image: Image) -> int | None:
    """Return the orientation that Exif in the header says; None without."""
    # Without this, the decoder of PNG would read the whole file to look for Exif behind the pixels.
    return image.getexif().get(_ORIENTATION) if "exif" in image.info else None


def _opened(path: Path, given: str) -> Image:
    """Return an image of which only the header is read. Raises DataError, and any error for broken files."""
    from PIL import Image

    try:
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
            image = Image.open(path)
    except Image.DecompressionBombError:
        raise DataError(_too_large(given, "")) from None
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise DataError(_too_large(given, f" of {width:,} x {height:,}"))
    return image


def _too_large(given: str, size: str) -> str:
    return f"the image {excerpt(given, 300)} has too many pixels{size}; {MOST_PIXELS:,} are allowed. Make it smaller"


def find_image_part(record: Mapping[str, object]) -> str | None:
    """Return the place of the first part of a message that is an image; None without."""
    for column, messages in record.items():
        for number, message in enumerate(_list(messages)):
            content = message.get("content") if isinstance(message, Mapping) else None
            for place, part in enumerate(_list(content)):
                if isinstance(part, Mapping) and part.get("type") == "image":
                    return f"`{column}[{number}]`.content[{place}]"
    return None


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()
