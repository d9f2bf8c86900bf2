"""Fixes for bugs of hivemind 1.1.12, applied at start. Each function states the bug it replaces."""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections.abc import Callable
from typing import Any

from hivemind.dht import node, protocol, routing
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p.p2p_daemon_bindings import control
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.proto import p2pd_pb2
from hivemind.utils import timed_storage

DICTIONARY_BYTES_MAX = 1 << 20  # record_book.PLACE_MAX records of 500 bytes: takes 20 ms (measured with 2,000)
_GONE = "the local p2pd is gone"


@functools.cache
def apply() -> None:
    """Patch hivemind, once per process."""
    timed_storage.TimedStorage.store = _store
    control.ControlClient._handle_persistent_request = _handle_persistent_request
    control.ControlClient._read_from_persistent_conn = _failing_pending_calls(_read_from_persistent_conn)
    control.ControlClient._write_to_persistent_conn = _failing_pending_calls(
        control.ControlClient._write_to_persistent_conn
    )
    control.ControlClient.call_unary_handler = _refusing_when_gone(control.ControlClient.call_unary_handler)
    DHTProtocol._validate_dictionary = _validate_dictionary
    DictionaryDHTValue.unpackb = _bounded(DictionaryDHTValue.unpackb)
    node.traverse_dht = _ending_by_itself(node.traverse_dht)


def keep_time(unix_s: Callable[[], float]) -> None:
    """The DHT of this process lives by `unix_s`. The original lives by a clock that can be set while it runs."""
    for module in (timed_storage, protocol, routing, node):
        module.get_dht_time = unix_s


def _ending_by_itself(original: Any) -> Any:
    """A search whose caller is cancelled ends by itself, with the answers it still waits for.

    The original cancels its workers only. Each leaves a task that waits for the end of the search, which never comes:
    asyncio says "Task was destroyed but it is pending!" when it collects them.
    """

    @functools.wraps(original)
    async def traverse(*args: Any, get_neighbors: Any, found_callback: Any = None, **options: Any) -> Any:
        cancelled = False

        async def ask(peer: Any, queries: Any) -> Any:
            return dict.fromkeys(queries, ((), True)) if cancelled else await get_neighbors(peer, queries)

        async def tell(*found: Any) -> None:
            if not cancelled and found_callback is not None:
                await found_callback(*found)

        try:
            return await asyncio.shield(original(*args, get_neighbors=ask, found_callback=tell, **options))
        except asyncio.CancelledError:
            cancelled = True
            raise

    return traverse


def _store(self: Any, key: Any, value: Any, expiration_time: float) -> bool:
    """A rejected store leaves the newer record as it is.

    The original first shortens the newer record's life to that of the rejected one, so replaying an old signed record
    removed the new one.
    """
    if expiration_time < timed_storage.get_dht_time() and not self.frozen:
        return False
    present = self.data.get(key)
    if present is not None and present.expiration_time >= expiration_time:
        return False
    entry = timed_storage.HeapEntry(expiration_time, key)
    self.key_to_heap[key] = entry
    heapq.heappush(self.expiration_heap, entry)
    self.data[key] = timed_storage.ValueWithExpiration(value, expiration_time)
    self._remove_outdated()
    return True


async def _handle_persistent_request(self: Any, call_id: Any, request: Any) -> None:
    """Every unary request gets an answer of legal size. Strangers see an exception's type, not its text."""
    try:
        response = await _unary_response(self, request)
        payload = p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=response)
        if payload.ByteSize() > self.persistent_conn_max_msg_size:
            response = p2pd_pb2.CallUnaryResponse(error=b"the response exceeds the message size limit")
            payload = p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=response)
        await self._pending_messages.put(payload)
    finally:
        self._handler_tasks.pop(call_id, None)


async def _unary_response(self: Any, request: Any) -> Any:
    handler = self.unary_handlers.get(request.proto)
    if handler is None:
        return p2pd_pb2.CallUnaryResponse(error=b"protocol not supported")
    try:
        return p2pd_pb2.CallUnaryResponse(response=await handler(request.data, PeerID(request.peer)))
    except Exception as error:  # noqa: BLE001  hivemind's own handlers may raise anything on a stranger's bytes
        return p2pd_pb2.CallUnaryResponse(error=type(error).__name__.encode())


class _OpenCalls(dict[Any, Any]):
    """Calls that wait for an answer: a cancelled one is not among them, although it is there until p2pd knows."""

    def __contains__(self, call_id: object) -> bool:
        return (call := self.get(call_id)) is not None and not call.done()


_READ = control.ControlClient._read_from_persistent_conn


async def _read_from_persistent_conn(self: Any, reader: Any) -> None:
    """An answer to a cancelled call is dropped. In the original it ends the reader, and with it all other calls."""
    self._pending_calls = _OpenCalls(self._pending_calls)
    await _READ(self, reader)


def _failing_pending_calls(original: Any) -> Any:
    """Calls that wait on the connection to p2pd fail when it ends. In the original they hang for ever."""

    @functools.wraps(original)
    async def run(self: Any, stream: Any) -> None:
        try:
            await original(self, stream)
        except OSError:
            pass
        finally:
            self.is_gone = True
            for waiting in list(self._pending_calls.values()):
                if not waiting.done():
                    waiting.set_exception(control.P2PDaemonError(_GONE))

    return run


def _refusing_when_gone(original: Any) -> Any:
    """A call after the end of that connection fails at once."""

    @functools.wraps(original)
    async def call(self: Any, peer_id: Any, proto: str, data: bytes) -> Any:
        if getattr(self, "is_gone", False):
            raise control.P2PDaemonError(_GONE)
        return await original(self, peer_id, proto, data)

    return call


def _bounded(original: Any) -> Any:
    """The original takes as long as a holder's dictionary is large, and holds the event loop meanwhile."""

    def unpackb(raw: bytes) -> Any:
        if len(raw) > DICTIONARY_BYTES_MAX:
            raise ValueError(f"a dictionary of {len(raw)} bytes; at most {DICTIONARY_BYTES_MAX}")
        return original(raw)

    return unpackb


def _validate_dictionary(self: Any, key: bytes, dictionary: DictionaryDHTValue) -> bool:
    """Drop the invalid entries and keep the rest.

    The original rejects the whole dictionary, so that one bad entry (or one whose time to live passes at a node whose
    clock is ahead) hides every honest record behind it.
    """
    if self.record_validator is None:
        return True
    with dictionary.freeze():
        entries = list(dictionary.items())
    for subkey, (value, expiration_time) in entries:
        if not self._validate_record(key, self.serializer.dumps(subkey), value, expiration_time):
            del dictionary[subkey]
    return True
