"""Files with signing keys."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from casckpt.base.digest import hex_digest


class Pair(NamedTuple):
    """Two files of a key pair, and the key's name in the store."""

    private: Path
    public: Path
    name: str


def pair(folder: Path, name: str = "alice", *, ssh: bool = False, password: bytes | None = None) -> Pair:
    """Return a key pair that depends only on its name, in the format of OpenSSL or ssh-keygen."""
    folder.mkdir(exist_ok=True)
    key = Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b"."))
    how: KeySerializationEncryption = BestAvailableEncryption(password) if password else NoEncryption()
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    forms = (PrivateFormat.OpenSSH, Encoding.OpenSSH, PublicFormat.OpenSSH)
    plain = (PrivateFormat.PKCS8, Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    secret, encoding, shown = forms if ssh else plain
    private.write_bytes(key.private_bytes(Encoding.PEM, secret, how))
    public.write_bytes(key.public_key().public_bytes(encoding, shown))
    return Pair(private, public, hex_digest(key.public_key().public_bytes_raw()))
