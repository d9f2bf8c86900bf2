"""Text of strangers on a terminal."""

from __future__ import annotations

from swarmnode.untrusted_text import readable


def test_a_models_words_move_no_cursor() -> None:
    """What a stranger's model says may be an escape sequence, such as one that writes to the clipboard."""
    assert readable("a\tb\n\x1b]52;c;cm0gLXJm\x07\x9b2J\u202eé") == "a\tb\n ]52;c;cm0gLXJm  2J é"
