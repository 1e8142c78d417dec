"""Exit codes are told in words."""

from __future__ import annotations

import pytest

from launch.exit_codes import EXIT_CONFIG, MEANINGS, describe, exit_code_of_signal


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (EXIT_CONFIG, "78: nodes disagree, or the configuration cannot fit (a person; do not retry)"),
        (exit_code_of_signal(9), "137: ended by signal 9"),
        (-9, "-9: ended by signal 9"),
        (42, "42: no code of ours"),
    ],
)
def test_codes_in_words(code: int, text: str) -> None:
    assert describe(code) == text


def test_the_table_is_that_of_the_documentation() -> None:
    assert sorted(MEANINGS) == [0, 1, 2, 69, 70, 75, 78]
