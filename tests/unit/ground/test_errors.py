"""What of another's error goes into a line of ours."""

import pytest

from mobius.errors import first_line


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
