import os
from pathlib import Path

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import LocalFault, NotPermitted, RemoteFault
from swarmnode.base.identity import Identity, peer_id_bytes, peer_id_of, public_key_of, verify
from swarmnode.base.ids import PeerId
from swarmnode.net.transport.key_file import create, load, load_or_create


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_is_what_libp2p_makes_of_the_key(public_key: bytes) -> None:
    serialised = crypto_pb2.PublicKey(key_type=crypto_pb2.Ed25519, data=public_key).SerializeToString()
    theirs = PeerID(b"\x00" + bytes([len(serialised)]) + serialised)
    assert peer_id_of(public_key) == theirs.to_base58()
    assert peer_id_bytes(peer_id_of(public_key)) == theirs.to_bytes()
    assert public_key_of(peer_id_of(public_key)) == public_key


@given(st.text(max_size=60))
def test_other_texts_hold_no_key(text: str) -> None:
    with pytest.raises(RemoteFault, match="not an Ed25519 peer id"):
        public_key_of(PeerId(text))


def test_signatures() -> None:
    me = Identity.of_seed(bytes(32))
    other = Identity.of_seed(bytes([1] * 32))
    signature = me.sign(b"word")
    assert verify(me.peer_id, b"word", signature)
    assert not verify(me.peer_id, b"words", signature)
    assert not verify(other.peer_id, b"word", signature)
    assert not verify(me.peer_id, b"word", signature[:-1])
    assert not verify(PeerId("nobody"), b"word", signature)
    assert Identity.of_seed(me.seed).peer_id == me.peer_id
    assert me.seed.hex() not in repr(me)


def test_a_key_file_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "node.key"
    identity = load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert load_or_create(path).peer_id == load(path).peer_id == identity.peer_id
    assert [p.name for p in path.parent.iterdir()] == ["node.key"]
    private = crypto_pb2.PrivateKey.FromString(path.read_bytes())
    assert private.key_type == crypto_pb2.Ed25519
    assert private.data == identity.seed + identity.public_key
    assert create(path).peer_id == load(path).peer_id == identity.peer_id


def test_a_key_file_that_may_not_be_used(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    create(path)
    path.chmod(0o640)
    with pytest.raises(NotPermitted, match=rf"mode 0640\): run  chmod 600 {path}"):
        load_or_create(path)
    path.chmod(0o600)
    whole = path.read_bytes()
    for wrong, says in (
        (b"", "is not an Ed25519 node key"),
        (whole[:-1], "is not an Ed25519 node key"),
        (whole + b"x", "is not an Ed25519 node key"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "damaged"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(NotPermitted, match=says):
            load(path)
    newcomer = load_or_create(path)
    assert newcomer.peer_id == load(path).peer_id, "a damaged key is put aside, and the machine goes on as a newcomer"
    aside = [one for one in tmp_path.iterdir() if one != path and one.read_bytes() == wrong]
    assert len(aside) == 1, "what was there is kept"
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")


def test_a_key_file_that_cannot_be_written() -> None:
    with pytest.raises(LocalFault, match=r"/proc/none/node\.key cannot be written"):
        load_or_create(Path("/proc/none/node.key"))
    assert not [name for name in os.listdir("/proc") if name == "none"]
