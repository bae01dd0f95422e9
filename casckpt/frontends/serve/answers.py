"""Error responses of a hub: a status, a machine-readable code, and a message."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from casckpt.errors import CasckptError, Damaged, InvalidInput, MissingKey, NotFound, StorageError, Unsigned


class Refusal(Exception):
    """An error response. ``code``: an error code of ``huggingface_hub``, or ""."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> Response:
        """Return the response to send."""
        code = {"X-Error-Code": self.code} if self.code else {}
        headers = {"X-Error-Message": one_line(str(self)), **code, **self.headers}
        return JSONResponse({"error": str(self)}, self.status, headers=headers)


def no_repository(repo: str) -> Refusal:
    """Return the response for a run that does not exist."""
    return Refusal(404, "RepoNotFound", f"this store does not contain run {repo!r:.200}; /api/models lists its runs")


def no_revision(repo: str, revision: str) -> Refusal:
    """Return the response for a checkpoint that the run does not have."""
    message = f"{repo!r:.200} has no revision {revision!r:.120}; pass a step, a tag, latest, main or an id"
    return Refusal(404, "RevisionNotFound", message)


def no_file(path: str, commit: str) -> Refusal:
    """Return the response for a file that a checkpoint does not have. Clients cache this response under ``commit``."""
    return Refusal(404, "EntryNotFound", f"this checkpoint has no file {path!r:.200}", X_Repo_Commit=commit)


def refusal_of(error: CasckptError) -> Refusal:
    """Return the response for a store error. The status is 429 or 503 only for errors that a retry may resolve."""
    if isinstance(error, Damaged):
        return Refusal(500, "", str(error))
    if isinstance(error, Unsigned):
        return Refusal(403, "", str(error))
    if isinstance(error, NotFound):
        return Refusal(404, "RevisionNotFound", str(error))
    if isinstance(error, InvalidInput | MissingKey):
        return Refusal(422, "", str(error))
    if isinstance(error, StorageError):
        return Refusal(503, "", str(error), Retry_After="5")
    return Refusal(500, "", str(error))


def one_line(text: str) -> str:
    """Convert ``text`` to a single line of ASCII for a header."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(plain.split()).encode("ascii", "replace").decode()[:1000]
