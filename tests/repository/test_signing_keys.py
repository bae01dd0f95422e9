"""Signing keys from OpenSSL and ssh-keygen files, and errors for other files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from casckpt.errors import InvalidInput, NotFound, Unsupported
from casckpt.repository.signing_keys import is_right, key_name, private_key, private_key_of, public_key_of, public_keys
from tests.support.signing import pair


@pytest.mark.parametrize("ssh", [False, True])
def test_a_pair_of_key_files_counts_as_one_key(tmp_path: Path, ssh: bool) -> None:
    made = pair(tmp_path, ssh=ssh)
    (public,) = public_keys(made.public)
    secret = private_key(made.private)
    assert public == public_key_of(secret) == public_key_of(private_key_of(secret.private_bytes_raw()))
    assert key_name(public) == made.name
    assert is_right(public, secret.sign(b"x"), b"x")
    assert not is_right(public, secret.sign(b"x"), b"y")
    assert not is_right(public, b"", b"x")


def test_hex_keys_are_accepted_and_any_one_of_several_keys_suffices(tmp_path: Path) -> None:
    one, other = pair(tmp_path, "alice"), pair(tmp_path, "bob", ssh=True)
    (first,) = public_keys(str(one.public))
    assert public_keys(first.hex()) == {first}
    assert public_keys([first.hex(), other.public]) == public_keys([one.public, other.public])


def test_a_password_unlocks_only_its_own_key(tmp_path: Path) -> None:
    made = pair(tmp_path, password=b"open")
    assert public_keys(made.public) == {public_key_of(private_key(made.private, b"open"))}
    for wrong in (None, b"shut"):
        with pytest.raises(InvalidInput, match=r"alice\.key is not a valid private key"):
            private_key(made.private, wrong)


def rsa(path: Path) -> tuple[Path, Path]:
    key = generate_private_key(public_exponent=65537, key_size=2048)
    private, public = path / "rsa.key", path / "rsa.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_the_error_for_an_invalid_key_names_it(tmp_path: Path) -> None:
    made, (private, public) = pair(tmp_path), rsa(tmp_path)
    (tmp_path / "text").write_text("ssh-ed25519 no")
    with pytest.raises(InvalidInput, match=r"alice\.key is a private key"):
        public_keys(made.private)
    for path in (public, tmp_path / "text", tmp_path):
        with pytest.raises(InvalidInput, match=path.name):
            public_keys(path)
    for path in (private, made.public, tmp_path / "text", tmp_path):
        with pytest.raises(InvalidInput, match=path.name):
            private_key(path)
    with pytest.raises(NotFound, match="nowhere"):
        public_keys(tmp_path / "nowhere")
    for nothing in ([], 7, [None]):
        with pytest.raises(InvalidInput, match="key"):
            public_keys(nothing)  # type: ignore[arg-type]  # what a user may give


def test_the_error_for_a_missing_library_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pair(tmp_path)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(Unsupported, match=r"pip install 'casckpt\[sign\]'"):
        public_keys(made.public)
