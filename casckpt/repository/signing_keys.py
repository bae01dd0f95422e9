"""Reads signers' Ed25519 keys (RFC 8032) from files in OpenSSL and ssh-keygen formats."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NewType, TypeAlias

from casckpt.base.digest import hex_digest
from casckpt.errors import InvalidInput, NotFound, Unsupported

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PublicKey = NewType("PublicKey", bytes)
"""The key's 32 bytes."""
KeyFile: TypeAlias = str | os.PathLike[str]
"""The path of a key file. A public key can also be passed as 64 hex digits."""
KeyFiles: TypeAlias = KeyFile | Sequence[KeyFile]

_HEX = re.compile("[0-9a-f]{64}")
_MOST_BYTES = 65536
_MAKE = "create one with `openssl genpkey -algorithm ed25519` or `ssh-keygen -t ed25519`"


def public_keys(given: KeyFiles) -> frozenset[PublicKey]:
    """Read the public keys in ``given``, which must not be empty.

    Raises `NotFound`, `InvalidInput`, and `Unsupported`.
    """
    named = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not named:
        raise InvalidInput("no public key was passed, so no signature can be verified: pass a public key file")
    return frozenset(map(_public_key, named))


def key_name(key: PublicKey) -> str:
    """Return the 64 hex digits that identify a key in the store."""
    return hex_digest(key)


def private_key(file: KeyFile, password: bytes | None = None) -> Ed25519PrivateKey:
    """Read a signer's private key. Raises `NotFound`, `InvalidInput`, and `Unsupported`."""
    data = _read(file)
    with _key_errors(f"{os.fspath(file)} is not a valid private key"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

        load = load_ssh_private_key if b"OPENSSH" in data[:64] else load_pem_private_key
        if isinstance(key := load(data, password), Ed25519PrivateKey):
            return key
    raise InvalidInput(f"{os.fspath(file)} is not an Ed25519 key: {_MAKE}")


def private_key_of(raw: bytes) -> Ed25519PrivateKey:
    """Return the private key with these 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(raw)


def public_key_of(key: Ed25519PrivateKey) -> PublicKey:
    """Return the public half of a key."""
    return PublicKey(key.public_key().public_bytes_raw())


def is_right(key: PublicKey, signature: bytes, message: bytes) -> bool:
    """Return whether ``signature`` is a valid signature of ``message`` with ``key``. Raises `Unsupported`."""
    with _key_errors("casckpt cannot use this key"):
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
        except InvalidSignature:
            return False
    return True


def _public_key(given: KeyFile) -> PublicKey:
    if isinstance(given, str) and _HEX.fullmatch(given):
        return PublicKey(bytes.fromhex(given))
    data = _read(given)
    if b"PRIVATE KEY" in data:
        raise InvalidInput(
            f"{os.fspath(given)} is a private key, which only its signer should have: pass the public key instead"
        )
    with _key_errors(f"{os.fspath(given)} is not a valid public key"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

        load = load_ssh_public_key if data.startswith(b"ssh-") else load_pem_public_key
        if isinstance(key := load(data), Ed25519PublicKey):
            return PublicKey(key.public_bytes_raw())
    raise InvalidInput(f"{os.fspath(given)} is not an Ed25519 key: {_MAKE}")


def _read(file: KeyFile) -> bytes:
    try:
        with Path(file).expanduser().open("rb") as opened:
            return opened.read(_MOST_BYTES)
    except FileNotFoundError as error:
        raise NotFound(f"there is no key file {os.fspath(file)!r}: check the path") from error
    except (OSError, TypeError) as error:
        raise InvalidInput(f"cannot read the key {file!r:.200} ({error}): pass the path of a key file") from error


@contextmanager
def _key_errors(what: str) -> Iterator[None]:
    """Convert errors of the cryptography package to casckpt errors, with ``what`` in the message.

    Raises `InvalidInput` and `Unsupported`.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
    except ImportError as error:
        raise Unsupported("signatures need the package cryptography: pip install 'casckpt[sign]'") from error
    try:
        yield
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: about a password
        raise InvalidInput(f"{what}: {error}") from error
