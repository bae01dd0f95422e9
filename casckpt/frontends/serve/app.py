"""The application of a hub: who may ask, and which call answers a request."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import parse_qs, quote, unquote_to_bytes

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from casckpt.errors import CasckptError, InvalidInput
from casckpt.frontends.serve.answers import Refusal, no_repository, refusal_of
from casckpt.frontends.serve.folders import File, FileSpan, ServedFolder, Unsatisfiable, parse_range
from casckpt.frontends.serve.hub import MAIN, Hub, commit_of
from casckpt.frontends.serve.sending import Desk, RangeResponse

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
            return Refusal(401, "", "a token is required: set HF_TOKEN", WWW_Authenticate="Bearer")
        if not any([hmac.compare_digest(given.encode(), one.encode()) for one in self.tokens]):  # noqa: C419 - all
            return Refusal(401, "", "Invalid credentials in Authorization header", WWW_Authenticate="Bearer")
        return None


def _given(header: str) -> str | None:
    """Return the token in a header."""
    kind, _, value = header.partition(" ")
    return value.strip() if kind.lower() == "bearer" else None


_VERBS = ("revision", "tree", "refs", "commits", "paths-info")
_RESOLVE = ("resolve", "raw")
_BODY_BYTES, _BODY_SECONDS = 1 << 20, 20.0
_SAFE: Final = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox"}

log = logging.getLogger("casckpt.frontends.serve")


def app_of(hub: Hub, *, tokens: frozenset[str] | None, checks_host: bool = True) -> ASGIApp:
    """Return the ASGI application for a hub. ``tokens``, ``checks_host``: see `Guard`."""

    @asynccontextmanager
    async def desk(app: Starlette) -> AsyncIterator[None]:
        app.state.desk = Desk(hub.store, hub.folders)
        try:
            yield
        finally:
            app.state.desk.close()

    routes = [
        Route("/{path:path}", partial(_get, hub), methods=["GET"]),
        Route("/{path:path}", partial(_post, hub), methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {
        Refusal: _refused, CasckptError: _failed, HTTPException: _not_allowed, ClientDisconnect: _gone,
    }  # fmt: skip
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=desk)
    app.router.redirect_slashes = False  # the redirect would go to a URL built from the client's Host header
    return Guard(app, tokens, checks_host)


async def _get(hub: Hub, request: Request) -> Response | RangeResponse:
    parts = _parts(request)
    if parts[:2] == ["api", "models"]:
        return JSONResponse(await _desk(request).ask(_api_call(hub, request, parts[2:])), headers=_SAFE)
    repo, verb, rest = _cut(parts, _RESOLVE)
    if not verb or len(rest) < 2:
        raise no_repository("/".join(parts))
    folder, file = await _desk(request).ask(partial(hub.file, repo, rest[0], "/".join(rest[1:])))
    commit = commit_of(folder.checkpoint.id)
    if rest[0] != commit:
        return _redirected(commit, rest[1:])
    return _file(request, folder, file)


def _redirected(commit: str, parts: Sequence[str]) -> Response:
    """Redirect to the same file at its commit, so that a client gets all files from one checkpoint.

    The location is relative, so it works behind any proxy.
    """
    location = "../" * len(parts) + "/".join((commit, *(quote(part, safe="") for part in parts)))
    return Response(status_code=307, headers={"Location": location, "X-Repo-Commit": commit})


def _api_call(hub: Hub, request: Request, parts: Sequence[str]) -> Callable[[], Any]:
    """Return the call that answers a request to the models API."""
    if not any(parts):
        return partial(hub.models, request.query_params.get("search", ""))
    repo, verb, rest = _cut(parts, _VERBS)
    revision = rest[0] if rest else MAIN
    calls: dict[str, Callable[[], Any]] = {
        "": partial(hub.info, repo, revision, blobs=_is_set(request, "blobs")),
        "refs": partial(hub.refs, repo),
        "commits": partial(hub.commits, repo, revision),
        "tree": partial(
            hub.tree, repo, revision, "/".join(rest[1:]),
            recursive=_is_set(request, "recursive"), expand=_is_set(request, "expand"),
        ),
    }  # fmt: skip
    calls["revision"] = calls[""]
    if verb not in calls:
        raise Refusal(405, "", "paths-info requires a POST request", Allow="POST")
    return calls[verb]


async def _post(hub: Hub, request: Request) -> Response:
    """Answer a paths-info request, the only kind of request that has a body."""
    parts = _parts(request)
    repo, verb, rest = _cut(parts[2:], _VERBS) if "paths-info" in parts else ("", "", ())
    if parts[:2] != ["api", "models"] or verb != "paths-info" or len(rest) != 1:
        raise _read_only()
    form = parse_qs((await _body(request)).decode("utf-8", "replace"))
    expand = form.get("expand", [""])[-1].lower() == "true"
    found = await _desk(request).ask(partial(hub.paths, repo, rest[0], form.get("paths", []), expand=expand))
    return JSONResponse(found, headers=_SAFE)


def _read_only() -> Refusal:
    return Refusal(405, "", "this hub is read-only: save checkpoints with casckpt", Allow="GET, HEAD")


async def _body(request: Request) -> bytes:
    """Return the body of a request. Raises Refusal if it is too large or takes too long to arrive."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _BODY_BYTES:
                    raise Refusal(413, "", f"the body is larger than {_BODY_BYTES} bytes", Connection="close")
    except TimeoutError:
        raise Refusal(408, "", f"the body did not arrive within {_BODY_SECONDS:.0f} s", Connection="close") from None
    return bytes(body)


def _file(request: Request, folder: ServedFolder, file: File) -> Response | RangeResponse:
    """Send a file, a range of a file, or only the headers."""
    size, etag = file.nbytes, f'"{file.etag}"'
    headers = {
        **_SAFE, "ETag": etag, "X-Repo-Commit": commit_of(folder.checkpoint.id), "Accept-Ranges": "bytes",
        "Content-Type": "application/json" if file.name.endswith(".json") else "application/octet-stream",
    }  # fmt: skip
    if not _names(request.headers.get("if-match", "*"), etag):
        raise Refusal(412, "", f"the file has changed: its ETag is {etag} now")
    if _names(request.headers.get("if-none-match", ""), etag):
        return Response(status_code=304, headers=headers)
    headers["Content-Length"] = str(size)
    if request.method == "HEAD":
        return Response(headers=headers)
    is_current = request.headers.get("if-range", etag) == etag
    try:
        span = parse_range(request.headers.get("range"), size) if is_current else None
    except Unsatisfiable as error:
        raise Refusal(416, "", str(error), Content_Range=f"bytes */{size}") from None
    if span is not None:
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{size}"
        headers["Content-Length"] = str(span.stop - span.start)
    return RangeResponse(_desk(request), folder, file, span or FileSpan(0, size), headers)


def _names(condition: str, etag: str) -> bool:
    """Return whether a condition matches this file. "*" matches any file."""
    return condition.strip() == "*" or etag in condition


def _parts(request: Request) -> list[str]:
    """Return the parts of the path. Each is decoded separately, so an encoded slash does not split a part.

    Raises Refusal.
    """
    raw: bytes = request.scope["raw_path"]
    try:
        parts = [unquote_to_bytes(part).decode() for part in raw.split(b"/")[1:]]
    except UnicodeDecodeError:
        raise Refusal(400, "", "the path is not UTF-8") from None
    if any(ord(letter) < 32 for part in parts for letter in part):
        raise Refusal(400, "", "the path contains control characters")
    return parts


def _cut(parts: Sequence[str], verbs: Sequence[str]) -> tuple[str, str, Sequence[str]]:
    """Split a path into its repository, the verb that follows ("" if there is none), and the rest."""
    for count in (1, 2):
        if len(parts) > count and parts[count] in verbs:
            return "/".join(parts[:count]), parts[count], parts[count + 1 :]
    if len(parts) > 2:
        raise no_repository("/".join(parts[:2]))
    return "/".join(parts), "", ()


def _is_set(request: Request, name: str) -> bool:
    return request.query_params.get(name, "").lower() in ("true", "1")


def _desk(request: Request) -> Desk:
    desk: Desk = request.app.state.desk
    return desk


async def _refused(_: Request, error: Exception) -> Response:
    return error.response() if isinstance(error, Refusal) else Response(status_code=500)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer with the response for a store error."""
    log.warning("%s %s: %s", request.method, request.url.path, error)
    return (refusal_of(error) if isinstance(error, CasckptError) else Refusal(500, "", "")).response()


async def _not_allowed(_: Request, error: Exception) -> Response:
    """Answer a request that the framework rejects, for example because of its method."""
    return (_read_only() if getattr(error, "status_code", 0) == 405 else Refusal(404, "", "not found")).response()


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=400)  # the client has disconnected
