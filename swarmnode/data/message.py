"""Parts of a message beside its text: calls of tools, and a weight."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swarmnode.base.errors import DataError

Message = Mapping[str, Any]
"""`role`, and what the template reads beside it: mostly `content`, also `tool_calls` or `reasoning_content`."""

CALLS = "tool_calls"
FORMER_CALL = "function_call"  # one call alone, as OpenAI wrote it until tools came
WEIGHT = "weight"
"""0 where an answer is no target, in the files that OpenAI and Mistral tune from; else 1."""


def counts(message: Message) -> bool:
    """Whether an answer is a target. Raises DataError for a weight other than 0 and 1."""
    weight = message.get(WEIGHT)
    if weight not in (None, 0, 1):
        raise DataError(f'a message has the weight {ascii(weight)[:40]}; known are 0, "not trained on", and 1')
    return weight is None or weight == 1


def called(message: Message) -> Iterator[Mapping[str, Any]]:
    """The functions that `message` calls: name and arguments."""
    calls = message.get(CALLS)
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield function
    if isinstance(former := message.get(FORMER_CALL), dict):
        yield former


def with_objects(message: Message) -> Message:
    """`message`, the arguments of its calls as objects where they are JSON texts, as OpenAI writes them."""
    calls = message.get(CALLS)
    if not isinstance(calls, list):
        return message
    return {**message, CALLS: [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _with_object(function)}
    if isinstance(given := call.get("arguments"), str):
        try:
            value = json.loads(given or "{}")
        except (ValueError, RecursionError):
            return call
        return {**call, "arguments": value} if isinstance(value, dict) else call
    return call


def with_names(message: Message, name: str) -> Message:
    """`message`, each function that it calls named `name`."""
    changed = dict(message)
    if isinstance(calls := message.get(CALLS), list):
        changed[CALLS] = [_named(call, name) for call in calls]
    if isinstance(former := message.get(FORMER_CALL), dict):
        changed[FORMER_CALL] = _named(former, name)
    return changed


def _named(call: Any, name: str) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _named(function, name)}
    return {**call, "name": name}


def shown_as_python(text: str, messages: Sequence[Message]) -> bool:
    """Whether `text` has the arguments of a call of `messages` as Python prints an object."""
    given = [function.get("arguments") for message in messages for function in called(message)]
    return any(isinstance(one, dict) and one and str(one) in text for one in given)
