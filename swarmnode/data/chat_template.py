"""Conversations as token ids and loss masks, as transformers makes them. Only answers count in the loss.

transformers finds, compiles and renders the chat template and builds the tokenizer; without a template ChatML is used.
Where a template marks what the assistant generates (`{% generation %}`), the mask is that of
`apply_chat_template(..., return_assistant_tokens_mask=True)`. Elsewhere the whole conversation is rendered once and
tokenised once, and the answers are found in the text by their offsets.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmnode.base.errors import DataError, NotPermitted, cause_of
from swarmnode.base.limited_child import bounded
from swarmnode.data.message import Message, called, counts, shown_as_python, with_names, with_objects
from swarmnode.data.tokens import (
    HuggingFaceTokenizer,
    Tokenizer,
    Tokens,
    config_in,
    huggingface_tokenizer,
    keep_merges,
    named_eos,
    panics_are_faults,
)

CONFIG_FILE = "tokenizer_config.json"
PROCESSOR_TEMPLATE = "chat_template.json"
ANSWERS = "assistant"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] != 'text' %}{{ raise_exception('ChatML has no parts of type ' + part['type']) }}{% endif %}"
    "{{ part['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARK = "\ue0f7\ue0f3\ue0f9"  # private use: no template writes it, and no conversation should
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)

Span = tuple[int, int]
"""[first, last) characters of a rendered conversation."""


class Conversation(tuple[Message, ...]):
    """The messages of a conversation, and the tools that it may call."""

    tools: Any = None


class ChatTemplate:
    """A chat template and the special tokens that it may write. `encode` makes ids and mask of a conversation."""

    def __init__(self, source: str | None = None, hub: Any = None) -> None:
        """`hub` is transformers' tokenizer, None for the byte tokenizer. `source` is the template; None: the
        tokenizer's own, or ChatML without one."""
        self._hub = hub
        own = None if hub is None else hub.chat_template
        if isinstance(own, dict):  # named templates; transformers takes "tool_use" where there are tools
            own = "\0".join(f"{name}\0{one}" for name, one in sorted(own.items()))
        self._given = source if source is not None or own is not None else CHATML
        self.source = str(own if self._given is None else self._given)
        """The template's text, by which a half-made data set is recognised."""

    def encode(self, conversation: Conversation, tokenizer: Tokenizer) -> tuple[str, Tokens, npt.NDArray[np.uint8]]:
        """(text, ids [n], mask [n]: 1 where a token counts as a target). Raises DataError when the template rejects
        the conversation."""
        conversation, text = self._shown(self._with_calls(conversation))
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError("conversation with half a character (a lone surrogate)") from None
        if self._hub is not None and _GENERATION.search(_COMMENT.sub("", self._chosen(conversation))):
            return text, *self._marked(conversation, text, tokenizer)
        ids, mask = tokenizer.encode_spans(text, self.answers(conversation, text))
        return text, ids, mask

    def answers(self, conversation: Conversation, whole: str | None = None, *, counted: bool = True) -> list[Span]:
        """The answers in the text `whole` of the conversation, in order: each from the end of the generation prompt to
        the end of its turn. Those that count, or do not. Raises DataError as `encode`."""
        whole = self._render(conversation) if whole is None else whole
        spans = list[Span]()
        end = 0
        for number, message in enumerate(conversation):
            if message["role"] != ANSWERS:
                continue
            asked = self._tried(conversation[:number], conversation, prompt=True)
            told = self._tried(conversation[: number + 1], conversation)
            if asked and told and told.startswith(asked) and whole.startswith(told) and end <= len(asked) < len(told):
                span = (len(asked), len(told))
            else:  # what comes later changes how this turn is written, as in templates that drop earlier thoughts
                span = self._located(conversation, number, whole, asked, end)
            if span[0] < span[1]:
                spans += [span] if counts(message) == counted else []
                end = span[1]
        return spans

    def render_prompt(self, messages: Sequence[Message]) -> tuple[str, str]:
        """(the conversation with the prompt for the next answer, the text that ends an answer). Raises DataError when
        the template rejects the conversation."""
        text = self._render(messages, prompt=True)
        told = self._render([*messages, {"role": ANSWERS, "content": MARK}])
        return text, told.rpartition(MARK)[2].strip()

    def ends(self, tokenizer: Tokenizer) -> list[int]:
        """The ids that end what the model generates: the tokenizer's end of text, and the special token that ends an
        answer of its own template."""
        tokens = [] if tokenizer.separator is None else [tokenizer.separator]
        if self._hub is None or self._given is not None:
            return tokens
        try:
            _, end = self.render_prompt([{"role": "user", "content": "?"}])
        except DataError:
            return tokens
        special = [token for token, one in self._hub.added_tokens_decoder.items() if one.special and one.content in end]
        return [*tokens, *(token for token in special if token not in tokens)]

    @property
    def own(self) -> str | list[dict[str, str]] | None:
        """The tokenizer's template, or its named ones as tokenizer_config.json holds them; None without one."""
        own = None if self._hub is None else self._hub.chat_template
        return [{"name": name, "template": one} for name, one in own.items()] if isinstance(own, dict) else own

    def _with_calls(self, conversation: Conversation) -> Conversation:
        """`conversation`, the arguments of calls as objects, which transformers' templates take (vLLM and transformers'
        own documentation); as they are where the template rejects objects or prints them as Python does. Raises
        DataError where it writes no calls."""
        calling = next((number for number, one in enumerate(conversation) if any(called(one))), None)
        if calling is None:
            return conversation
        given = _each(conversation, with_objects)
        text = self._tried(given, given) or self._tried(joined := _each(given, _joined), joined)
        if text is None or shown_as_python(text, given):
            given = conversation
        named = _each(given, functools.partial(with_names, name=MARK))
        text = self._tried(named, named) or self._tried(joined := _each(named, _joined), joined)
        if text is not None and MARK not in text:
            raise DataError(f"chat template: it writes no calls of tools, and message {calling + 1} has one")
        return given

    def _shown(self, conversation: Conversation) -> tuple[Conversation, str]:
        """(the conversation as the template takes it, the text of it). Some templates know texts alone: with parts
        they fail, write them as Python does (Llama 3, Gemma 2) or write nothing (Qwen3). They get the texts of the
        parts as one text. Raises DataError as `encode`, and where parts of another type are written so."""
        parts = [one["content"] for one in conversation if isinstance(one.get("content"), list)]
        if not parts:
            return conversation, self._render(conversation)
        text = self._tried(conversation, conversation)
        joined = _each(conversation, _joined)
        other = self._tried(joined, joined)
        if _parts_in(other, parts) > _parts_in(text, parts):
            return joined, str(other)
        if text is not None and _parts_in(text, parts) < 0:
            raise DataError("chat template: it takes texts alone, and a message has parts of another type")
        return conversation, self._render(conversation)

    def _chosen(self, conversation: Conversation) -> str:
        """The template that transformers takes for `conversation`."""
        return str(self._given or self._hub.get_chat_template(None, tools=conversation.tools))

    def _marked(
        self, conversation: Conversation, text: str, tokenizer: Tokenizer
    ) -> tuple[Tokens, npt.NDArray[np.uint8]]:
        """Ids and mask as transformers makes them of a template that marks what is generated."""
        made = self._call(
            conversation,
            conversation.tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = np.array(made["input_ids"], tokenizer.dtype)
        mask = np.array(made["assistant_masks"], np.uint8)
        if not all(map(counts, conversation)):
            mask &= 1 - tokenizer.encode_spans(text, self.answers(conversation, text, counted=False))[1]
        return ids, mask

    def _located(self, conversation: Conversation, number: int, whole: str, asked: str | None, least: int) -> Span:
        """The answer `number` in `whole`, by comparison with the same conversation in which that answer is MARK."""
        changed = Conversation(
            [*conversation[:number], _marked_message(conversation[number]), *conversation[number + 1 :]]
        )
        changed.tools = conversation.tools
        other = self._tried(changed, conversation) or ""
        if MARK not in other:
            raise DataError(f"chat template: it does not show message {number + 1}, an answer")
        first = _common(whole, other)
        last = len(whole) - min(_common(whole[::-1], other[::-1]), len(whole) - first, len(other) - first)
        before = self._tried(conversation[:number], conversation)
        start = first
        if asked is not None and before is not None and asked.startswith(before) and (prompt := asked[len(before) :]):
            at = whole.rfind(prompt, least, first)
            start = at + len(prompt) if at >= 0 else first
        turn = self._tried(changed[: number + 1], conversation)
        if turn is not None and MARK in turn:
            last += _common(whole[last:], turn.rpartition(MARK)[2])
        return max(start, least), last

    def _tried(self, messages: Sequence[Message], conversation: Conversation, *, prompt: bool = False) -> str | None:
        """The first messages of `conversation` as text; None where the template rejects so few of them."""
        try:
            return self._render(messages, conversation.tools, prompt=prompt)
        except DataError:
            return None

    def _render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        tools = messages.tools if isinstance(messages, Conversation) else tools
        return str(self._call(messages, tools, add_generation_prompt=prompt, tokenize=False))

    def _call(self, messages: Sequence[Message], tools: Any, **options: Any) -> Any:
        """transformers' `apply_chat_template`. Raises DataError when the template cannot be compiled, or rejects
        `messages`, NotPermitted when it takes too long."""
        hub = self._hub if self._hub is not None else _byte_hub()
        try:
            with panics_are_faults(), bounded():
                return hub.apply_chat_template(list(messages), tools=tools, chat_template=self._given, **options)
        except TimeoutError as error:
            raise NotPermitted(f"chat template: {error}") from None
        except Exception as error:  # noqa: BLE001  templates are code: they raise what Python raises
            raise DataError(f"chat template: {type(error).__name__}: {cause_of(error)[:200]}") from None


def _each(conversation: Conversation, change: Callable[[Message], Message]) -> Conversation:
    """`conversation` with each message changed."""
    changed = Conversation(map(change, conversation))
    changed.tools = conversation.tools
    return changed


def _marked_message(message: Message) -> Message:
    """`message`, all that it says replaced by MARK."""
    content: Any = [{"type": "text", "text": MARK}] if isinstance(message.get("content"), list) else MARK
    return {key: value for key, value in message.items() if key not in ("tool_calls", *THOUGHTS)} | {"content": content}


def _texts(content: Sequence[Any]) -> list[str]:
    """The texts among the parts of a message."""
    objects = [one for one in content if isinstance(one, dict) and one.get("type") == "text"]
    return [one["text"] for one in objects if isinstance(one.get("text"), str)]


def _joined(message: Message) -> Message:
    """`message`, its content one text if it is parts that are all texts."""
    content = message.get("content")
    if not isinstance(content, list) or len(texts := _texts(content)) < len(content):
        return message
    return {**message, "content": "".join(texts)}


def _parts_in(text: str | None, parts: Sequence[list[Any]]) -> int:
    """The number of the parts' texts in `text`; -1 if there is none, or if it has parts as Python writes them."""
    if text is None or any(content and str(content) in text for content in parts):
        return -1
    return sum(one.strip() in text for content in parts for one in _texts(content))


def _common(one: str, two: str) -> int:
    """The length of the common beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def conversation(raw: Any, tools: Any = None) -> Conversation | None:
    """`raw` as a conversation; `tools` are the tools it may call. None unless it is a list of objects with a `role`,
    one of them the assistant's."""
    if not isinstance(raw, list) or not raw:
        return None
    if not all(isinstance(message, dict) and type(message.get("role")) is str for message in raw):
        return None
    if not any(message["role"] == ANSWERS for message in raw):
        return None
    made = Conversation(raw)
    made.tools = tools or None
    return made


def tokenizer_and_template(path: Path | None, tokenizer: Tokenizer) -> tuple[Tokenizer, bytes | None, ChatTemplate]:
    """(tokenizer, its tokenizer.json, chat template) of the tokenizer.json at `path` and what lies beside it; of None:
    the byte tokenizer and ChatML.

    transformers rebuilds the tokenizers of some models from their class, whatever tokenizer.json says. What it reads is
    what counts here, too. Raises DataError when transformers cannot read the folder.
    """
    if path is None:
        return tokenizer, None, ChatTemplate()
    raw = path.read_bytes()
    hub = hub_tokenizer(path)
    keep_merges(hub.backend_tokenizer)
    theirs = hub.backend_tokenizer.to_str()
    if isinstance(tokenizer, HuggingFaceTokenizer) and not tokenizer.same_as(theirs):
        raw = theirs.encode()
        tokenizer = huggingface_tokenizer(raw, str(path), hub.eos_token or named_eos(path.parent))
    return tokenizer, raw, ChatTemplate(hub=hub)


def hub_tokenizer(path: Path) -> Any:
    """transformers' tokenizer of the tokenizer.json at `path` and the files beside it, without its code or network.
    Raises DataError when it cannot be made, or transformers is not installed."""
    auto = _library("AutoTokenizer")
    fast = _library("PreTrainedTokenizerFast")
    try:
        if path.name != "tokenizer.json":
            return fast(tokenizer_file=str(path))
        with panics_are_faults():
            load = functools.partial(auto.from_pretrained, path.parent, local_files_only=True, trust_remote_code=False)
            hub = load()
            elsewhere = config_in(path.parent, PROCESSOR_TEMPLATE).get("chat_template")
            # Processors of several kinds of input have it there.
            return load(chat_template=elsewhere) if hub.chat_template is None and elsewhere else hub
    except Exception as error:  # noqa: BLE001  it raises what reading JSON, Rust and Python raise
        raise DataError(f"{path.parent}: transformers cannot read this tokenizer: {cause_of(error)[:200]}") from None


@functools.cache
def _byte_hub() -> Any:
    """A tokenizer of transformers without special tokens, which renders for the byte tokenizer."""
    import tokenizers
    from tokenizers.models import WordLevel

    return _library("PreTrainedTokenizerFast")(tokenizer_object=tokenizers.Tokenizer(WordLevel({"": 0}, unk_token="")))


def _library(wanted: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice is for programs that run models
    try:
        import transformers
    except ImportError:
        raise DataError(
            "conversations are rendered by the library transformers: pip install 'transformers>=4.46' jinja2"
        ) from None
    return getattr(transformers, wanted)
