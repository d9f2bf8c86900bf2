import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import RunId
from swarmnode.base.wire import record_pb2 as wire
from swarmnode.net.membership.progress import to_message
from swarmnode.net.membership.record import SIGNED_BYTES_MAX, check_record, open_record, sign_record
from tests.support.records import ME, OTHER, resigned
from tests.support.transport_contract import RUN, record_of

NOW = 1_700_000_000.0


def opened(signed: wire.SignedRecord, now_unix_s: float = NOW, run_id: RunId = RUN) -> wire.Record:
    return open_record(signed, run_id=run_id, now_unix_s=now_unix_s, ttl_max_s=60.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"run_id": "12" * 32}, "record of run '1212121212121212'"),
        ({"expires_unix_ms": round((NOW - 1) * 1000)}, "expired 1.0 s ago"),
        ({"expires_unix_ms": round((NOW + 100) * 1000)}, "wants to live 100 s; at most 60 s"),
        ({"addresses": ["1.2.3.4"]}, "not a multiaddr"),
        ({"state": 0}, "no state"),
        ({"stage": 513}, "Record.stage = 513; expected 0 to 512"),
        ({"round_stride": 3}, "power of two"),
        ({"progress": to_message({OTHER.peer_id: 9})}, "progress of another feeder"),
        ({"addresses": ["/" + "x" * 200] * 7}, f"at most {SIGNED_BYTES_MAX}"),
        ({"peer_id": OTHER.peer_id}, "forged"),
        ({"peer_id": "nobody"}, "forged"),
    ],
)
def test_a_malformed_record_names_its_fault(change: dict[str, object], says: str) -> None:
    record = record_of(ME, NOW)
    for name, value in change.items():
        if isinstance(value, list):
            del getattr(record, name)[:]
            getattr(record, name).extend(value)
        elif isinstance(value, wire.Progress):
            getattr(record, name).CopyFrom(value)
        else:
            setattr(record, name, value)
    with pytest.raises(RemoteFault, match=says):
        opened(resigned(record))


def test_a_signature_is_for_records_only() -> None:
    raw = record_of(ME, NOW).SerializeToString()
    with pytest.raises(RemoteFault, match="forged"):
        opened(wire.SignedRecord(record=raw, signature=ME.sign(raw)))
    with pytest.raises(RemoteFault, match="signature of 3 bytes"):
        opened(wire.SignedRecord(record=raw, signature=b"abc"))
    with pytest.raises(RemoteFault, match="does not parse"):
        opened(wire.SignedRecord(record=b"\xff\xff", signature=bytes(64)))


@given(st.data())
def test_one_bit_makes_it_another_record(data: st.DataObject) -> None:
    signed = sign_record(record_of(ME, NOW), ME)
    field = data.draw(st.sampled_from(["record", "signature"]))
    raw = bytearray(getattr(signed, field))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    setattr(signed, field, bytes(raw))
    with pytest.raises(RemoteFault):
        check_record(signed, run_id=RUN)


def test_clocks_may_differ_a_little() -> None:
    signed = sign_record(record_of(ME, NOW, ttl_s=60), ME)
    assert opened(signed, NOW - 2.5)
    with pytest.raises(RemoteFault, match="wants to live"):
        opened(signed, NOW - 3.5)
