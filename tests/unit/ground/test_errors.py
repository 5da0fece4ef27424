"""What of another's error goes into a line of ours."""

import errno
import shutil

import pytest

from mobius.errors import first_line, reason_of


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no space left\nat line 3", "no space left"),
        ("\nbackend raised:\nRuntimeError: no compiler\nmore", "backend raised: RuntimeError: no compiler"),
        ("it ends here:", "it ends here:"),
        ("", "ValueError"),
    ],
)
def test_a_line_says_what_is_wrong(message: str, expected: str) -> None:
    assert first_line(ValueError(message)) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/file"), "No space left on device"),
        (OSError("the quota is used up\nask for more"), "the quota is used up"),
        (PermissionError(), "PermissionError"),
        (shutil.Error([("/a", "/b", "no room")]), "[('/a', '/b', 'no room')]"),
        (ValueError("embedded null byte"), "embedded null byte"),
    ],
)
def test_the_reason_of_an_error_is_never_nothing(error: Exception, expected: str) -> None:
    assert reason_of(error) == expected
