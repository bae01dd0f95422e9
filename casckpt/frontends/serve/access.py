"""Access control: a request needs a token or, on loopback without tokens, a Host header that names this machine."""

from __future__ import annotations

import hmac
import logging
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from casckpt.errors import InvalidInput
from casckpt.frontends.serve.answers import Refusal

log = logging.getLogger("casckpt.frontends.serve")
_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def tokens_in(text: str, where: str) -> frozenset[str]:
    """Return the tokens in a file, one per line.

    Raises InvalidInput for an empty file or a token that a header cannot hold.
    """
    tokens = frozenset(line.strip() for line in text.splitlines() if line.strip())
    if not tokens:
        raise InvalidInput(f"{where} does not contain a token; write one token per line")
    if not all(token.isascii() and token.isprintable() and " " not in token for token in tokens):
        raise InvalidInput(f"{where} contains a token with a space or a non-ASCII character; choose a different token")
    return tokens


@dataclass(frozen=True)
class Guard:
    """Accepts requests with one of ``tokens`` or, if that is None, requests whose Host header names this machine.

    The host check stops web pages whose domain resolves to this machine (DNS rebinding).
    """

    app: ASGIApp
    tokens: frozenset[str] | None
    checks_host: bool = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        try:
            await (self.app if refusal is None else refusal.response())(scope, receive, send)
        except Exception:
            log.exception("%s %s failed", scope.get("method", ""), scope.get("path", ""))
            raise

    def _refusal(self, headers: Mapping[str, str]) -> Refusal | None:
        if self.tokens is None:
            host = headers.get("host", "").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            is_ours = name in _LOCAL or is_loopback(name)
            return None if is_ours or not self.checks_host else Refusal(403, "", f"host {host!r:.80} is not allowed")
        given = _given(headers.get("authorization", ""))
        if given is None:
            return Refusal(401, "", "a token is required: set HF_TOKEN", WWW_Authenticate='Basic realm="casckpt"')
        if not any([hmac.compare_digest(given.encode(), one.encode()) for one in self.tokens]):  # noqa: C419 - all
            return Refusal(401, "", "Invalid credentials in Authorization header", WWW_Authenticate="Bearer")
        return None


def _given(header: str) -> str | None:
    """Return the token in a header: a Bearer token, or the password that a browser sends."""
    kind, _, value = header.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() != "basic":
        return None
    try:
        return b64decode(value, validate=True).decode().partition(":")[2]
    except ValueError:  # neither base64 nor UTF-8
        return ""
