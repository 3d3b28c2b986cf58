from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from geo_diloco.errors import RunDirError
from geo_diloco.manifest import PeerId
from geo_diloco.runtime.identity import Identity, admission_proof, is_peer_id, proof_is_valid, verify


def test_a_signature_holds_for_its_signer_and_its_bytes_only() -> None:
    one, other = Identity.generate(), Identity.generate()
    signature = one.sign(b"hello")
    assert verify(one.peer_id, b"hello", signature)
    assert not verify(one.peer_id, b"hullo", signature)
    assert not verify(other.peer_id, b"hello", signature)


@pytest.mark.parametrize(
    "spoil", [str.upper, lambda s: s[:-1], lambda s: s + "00", lambda s: " " + s[1:], lambda s: ""]
)
def test_a_malformed_signature_or_signer_is_just_not_valid(spoil) -> None:  # type: ignore[no-untyped-def]
    identity = Identity.generate()
    signature = identity.sign(b"hello")
    assert not verify(identity.peer_id, b"hello", spoil("ab" + signature[2:]))
    assert not verify(PeerId(spoil("ab" + identity.peer_id[2:])), b"hello", signature)
    assert not verify(identity.peer_id, b"hello", None)  # type: ignore[arg-type]
    assert not verify(None, b"hello", signature)  # type: ignore[arg-type]


def test_a_peer_id_has_one_spelling() -> None:
    identity = Identity.generate()
    assert is_peer_id(identity.peer_id)
    assert not is_peer_id("A" * 64)
    assert not is_peer_id("a" * 63)
    assert not is_peer_id(b"a" * 64)


def test_the_key_is_the_same_after_a_restart_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.key"
    first = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert [p.name for p in path.parent.iterdir()] == ["identity.key"]


def test_threads_that_create_a_key_at_once_end_with_one(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    found: list[str] = []
    barrier = threading.Barrier(4)

    def create() -> None:
        barrier.wait()
        found.append(Identity.load_or_create(path).peer_id)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert set(found) == {Identity.load_or_create(path).peer_id}


def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(RunDirError, match="chmod 600"):
        Identity.load_or_create(path)


def test_a_damaged_or_foreign_key_is_never_replaced_silently(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunDirError, match="damaged"):
        Identity.load_or_create(path)
    path.write_bytes(
        X25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    with pytest.raises(RunDirError, match="not an Ed25519 key"):
        Identity.load_or_create(path)


def test_a_folder_that_cant_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="identity key"):
        Identity.load_or_create(tmp_path / "file" / "identity.key")


def test_the_private_key_is_not_shown() -> None:
    identity = Identity.generate()
    assert repr(identity) == f"Identity({identity.peer_id[:8]})"


def test_a_proof_of_the_token_is_worth_nothing_for_another_peer_or_connection() -> None:
    one, other = Identity.generate().peer_id, Identity.generate().peer_id
    proof = admission_proof("secret", nonce="n1", peer=one)
    assert "secret" not in proof
    assert proof_is_valid(proof, "secret", nonce="n1", peer=one)
    assert not proof_is_valid(proof, "secret", nonce="n2", peer=one)
    assert not proof_is_valid(proof, "secret", nonce="n1", peer=other)
    assert not proof_is_valid(proof, "Secret", nonce="n1", peer=one)
    assert not proof_is_valid("ü", "secret", nonce="n1", peer=one)
    assert not proof_is_valid("", "secret", nonce="n1", peer=one)
