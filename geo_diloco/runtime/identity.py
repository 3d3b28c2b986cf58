"""Who a peer is: an Ed25519 key pair whose public half is the peer's id.

Stands apart because it is the one home of `cryptography`, and because a private key must never reach a log, a tape
or another module: nothing here gives it away. Whatever is signed names its purpose inside the signed bytes
(`wire.py` does so), so that a signature for one purpose is worth nothing for another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from geo_diloco.errors import RunDirError
from geo_diloco.manifest import PeerId

_PEER_ID = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_KEY_FILE_BYTES_MAX = 4096


class Identity:
    """A peer's key pair. Signs; does not show its private key."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.peer_id = PeerId(private_key.public_key().public_bytes_raw().hex())

    def __repr__(self) -> str:
        return f"Identity({self.peer_id[:8]})"

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The key in `path` (PEM, readable by its owner only), made if there is none.

        Two processes that create it at once end with the same key. Raises RunDirError if the file can't be used.
        """
        try:
            if not path.exists():
                _create_key_file(path, cls.generate()._to_pem())
            return cls(_read_key_file(path))
        except OSError as exc:
            raise RunDirError(f"identity key {path}: {exc.strerror or exc}; give a folder you can write to") from exc

    def sign(self, data: bytes) -> str:
        """128 lower-case hex characters."""
        return self._private_key.sign(data).hex()

    def _to_pem(self) -> bytes:
        return self._private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def verify(peer: PeerId, data: bytes, signature: str) -> bool:
    """Whether `peer` signed exactly these bytes. False, never an exception, for anything malformed."""
    if not is_peer_id(peer) or not isinstance(signature, str) or not _SIGNATURE.fullmatch(signature):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(peer)).verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return True


def is_peer_id(text: object) -> bool:
    """64 lower-case hex characters; any other spelling of the same key is another, refused, string."""
    return isinstance(text, str) and _PEER_ID.fullmatch(text) is not None


def admission_proof(token: str, *, nonce: str, peer: PeerId) -> str:
    """What `Hello.proof` holds: it shows that the peer knows the run's admission token, and is worth nothing for
    another peer or on another connection. The token itself never travels."""
    return hmac.new(token.encode(), f"geo-diloco admission\n{nonce}\n{peer}".encode(), hashlib.sha256).hexdigest()


def proof_is_valid(proof: str, token: str, *, nonce: str, peer: PeerId) -> bool:
    """Compared in constant time; false for anything malformed."""
    expected = admission_proof(token, nonce=nonce, peer=peer)
    return hmac.compare_digest(proof.encode("utf-8", "replace"), expected.encode())


def _create_key_file(path: Path, pem: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # unlike rename it never replaces a key that appeared meanwhile
        except FileExistsError:
            return
    finally:
        draft.unlink(missing_ok=True)


def _read_key_file(path: Path) -> Ed25519PrivateKey:
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        pem = file.read(_KEY_FILE_BYTES_MAX)
    if mode & 0o077:
        raise RunDirError(f"identity key {path} can be read by others (mode {mode:04o}): run `chmod 600 {path}`")
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise RunDirError(f"identity key {path} is damaged: restore it, or remove it to become a new peer") from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise RunDirError(f"identity key {path} is not an Ed25519 key: remove it to become a new peer")
    return key
