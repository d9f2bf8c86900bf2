"""Renders conversations as text segments. The model's answers count in the loss, the prompts do not.

The template is the tokenizer's (`chat_template` in the tokenizer_config.json beside it), rendered as the Hugging Face
libraries do. Without one, ChatML is used. Templates are the organiser's own files and are rendered in jinja's sandbox.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.errors import DataError

if TYPE_CHECKING:
    import jinja2

CONFIG_FILE = "tokenizer_config.json"
CONFIG_BYTES_MAX = 4 << 20
ANSWERS = "assistant"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Message = Mapping[str, str]
Segment = tuple[str, bool]
"""Text, and whether its tokens count as targets."""


class ChatTemplate:
    """A chat template. `segments` renders a conversation with it."""

    def __init__(self, source: str = CHATML, special: Mapping[str, str] | None = None) -> None:
        """`special` maps the token names that templates use (bos_token, eos_token, ...) to their text."""
        self.source = source
        self._special = dict(special or {})

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """The conversation as text, split at the answers. An answer runs from the end of the generation prompt to the
        end of its turn. Raises DataError when the template rejects the conversation, when later messages change how
        earlier ones are rendered, or when jinja cannot parse the template."""
        found, at = list[Segment](), 0
        whole = self._render(messages, prompt=False)
        for number, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            asked = self._render(messages[:number], prompt=True)
            told = self._render(messages[: number + 1], prompt=False)
            if not told.startswith(asked) or not whole.startswith(told):
                raise DataError("chat template: what comes later changes what was said before; it cannot be trained on")
            found += [(whole[at : len(asked)], False), (whole[len(asked) : len(told)], True)]
            at = len(told)
        found.append((whole[at:], False))
        return [segment for segment in found if segment[0]]

    def asked(self, messages: Sequence[Message]) -> tuple[str, str]:
        """(the conversation with the prompt for the next answer, the text that ends an answer). Raises DataError when
        the template rejects the conversation."""
        text = self._render(messages, prompt=True)
        mark = "an answer of swarmnode"
        told = self._render([*messages, {"role": ANSWERS, "content": mark}], prompt=False)
        return text, told.rpartition(mark)[2].strip()

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        import jinja2

        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt, **self._special)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise DataError(f"chat template: {str(error)[:200]}") from None

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        """The compiled template. It is compiled at the first conversation, so plain text needs no jinja2."""
        try:
            import jinja2
            import jinja2.sandbox
        except ImportError:
            raise DataError("conversations need the library jinja2: pip install jinja2") from None

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise DataError(f"chat template: {error}; correct chat_template in {CONFIG_FILE}") from None


def template_beside(tokenizer: Path | None) -> ChatTemplate:
    """The chat template beside the tokenizer.json at `tokenizer`, or ChatML if there is none. Raises DataError when the
    config file cannot be read."""
    if tokenizer is None or not (path := tokenizer.parent / CONFIG_FILE).is_file():
        return ChatTemplate()
    try:
        with path.open("rb") as file:
            tree = json.loads(file.read(CONFIG_BYTES_MAX))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {str(error)[:100]}") from None
    source = tree.get("chat_template") if isinstance(tree, dict) else None
    special = {key: _text(value) for key, value in tree.items() if key.endswith("_token")} if source else {}
    return ChatTemplate(source, special) if isinstance(source, str) else ChatTemplate()


def conversation(raw: Any) -> list[Message] | None:
    """`raw` as a list of messages with `role` and `content`. None unless it is a conversation with an answer."""
    if not isinstance(raw, list) or not raw:
        return None
    for message in raw:
        if not isinstance(message, dict) or not all(type(message.get(key)) is str for key in ("role", "content")):
            return None
    return raw if any(message["role"] == ANSWERS for message in raw) else None


def _text(value: Any) -> str:
    """The text of a special token, which may be written as a string or as an object with `content`."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""
