"""Text of others in Markdown: files that GitHub and the Hub show."""

import pytest

from swarmnode.base.untrusted_text import markdown_text


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("Ada", "Ada"),
        ("| <b>eve</b> [x](https://a.example)", "beve/b x(https: //a.example)"),
        ("@everyone and a@b.example", "＠everyone and a@b.example"),
        ("www.evil.example WWW.evil.example", "www evil.example www evil.example"),
        ("&lt;b&gt; ~~no~~ $x$", "＆lt;b＆gt; ～～no～～ ＄x＄"),
        ("two\nlines\x1b[31m", "two lines 31m"),
    ],
)
def test_markdown_shows_the_words_of_others_as_text(given: str, shown: str) -> None:
    assert markdown_text(given) == shown
