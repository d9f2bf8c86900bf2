"""A model that a person talks with: weights, tokenizer and chat template, and its answers piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.app.local.model_source import Moved, Note, gather
from swarmnode.app.local.text_pieces import pieces
from swarmnode.data.chat_template import ChatTemplate, tokenizer_and_template
from swarmnode.data.message import Message
from swarmnode.data.tokenizer_file import run_tokenizer, stops_of
from swarmnode.data.tokens import Tokenizer

if TYPE_CHECKING:
    from swarmnode.model.decoder import Decoder
    from swarmnode.model.gather import Gathered
    from swarmnode.model.text_generation import Sampling


@dataclass(frozen=True, slots=True)
class Speaker:
    """A whole model with its tokenizer. `path`: the tokenizer's file, None for bytes. `stops`: ids that end a text."""

    gathered: Gathered
    net: Decoder
    tokenizer: Tokenizer
    path: Path | None
    stops: frozenset[int]

    @classmethod
    def of(cls, source: str, kind: str, data: Path | None, note: Note, moved: Moved = lambda done, of: None) -> Speaker:
        """The model in `source`, its replicas merged. `kind`, `note` and `moved` are those of model_source.gather.
        Raises as that."""
        from swarmnode.app.local.evaluation import merged_model

        gathered, folder = gather(source, kind, note, moved)
        tokenizer, path = run_tokenizer(data or folder, gathered.manifest.data)
        return cls(gathered, merged_model(gathered), tokenizer, path, stops_of(tokenizer, path))

    def template(self) -> ChatTemplate:
        """The chat template beside the tokenizer, or ChatML. It looks at files: keep it."""
        return tokenizer_and_template(self.path, self.tokenizer)[2]

    def tokens_after(self, text: str, count: int, sampling: Sampling) -> Iterator[int]:
        """At most `count` ids that go on with `text`. Raises UsageError for an empty text."""
        from swarmnode.model.text_generation import generate

        ids = [int(token) for token in self.tokenizer.encode(text)]
        return generate(self.net, self.gathered.manifest.model, ids, count, sampling, self.stops)

    def answer(
        self, template: ChatTemplate, messages: Sequence[Message], count: int, sampling: Sampling
    ) -> Iterator[str]:
        """The answer to the last of `messages`, in pieces of text, of at most `count` tokens. Raises DataError when the
        template rejects the conversation."""
        text, end = template.render_prompt(messages)
        closing = [int(token) for token in self.tokenizer.encode(end)]
        return pieces(self.tokenizer, before(self.tokens_after(text, count, sampling), closing))


def before(tokens: Iterator[int], end: Sequence[int]) -> Iterator[int]:
    """`tokens` up to the ids `end` that close an answer; all of them if `end` is empty."""
    held = list[int]()
    for token in tokens:
        held.append(token)
        if end and held[-len(end) :] == list(end):
            del held[-len(end) :]
            break
        while len(held) > max(0, len(end) - 1):
            yield held.pop(0)
    yield from held
