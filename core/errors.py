"""Every error that crosses a room, with the HTTP status, type and code that a client sees.

`message` is safe for a client: it names the bound and the value given, never a path, an address,
a stack or prompt text. Whatever else an operator needs goes to the log beside the raise.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all expected errors. Subclasses fix `status`, `type` and a default `code`.

    `may_go_elsewhere`: the fault is the replica's or the moment's, not the request's, so another
    attempt may go well. A role says so of a job that it gives up (`JobFailed.retryable`)."""

    status: int = 500
    type: str = "internal_error"
    code: str = "internal_error"
    may_go_elsewhere: bool = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def body(self) -> dict[str, object]:
        """The error object of the HTTP body and of an error event inside a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(HeadraceError):
    """The request can never succeed as it stands; `param` names the offending field."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class LimitExceeded(InvalidRequest):
    """A value lies outside a `Limit`; the message gives the bound and the value."""

    code = "limit_exceeded"


class Unauthorized(HeadraceError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFound(HeadraceError):
    status = 404
    type = "not_found_error"
    code = "not_found"


class MethodNotAllowed(HeadraceError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(HeadraceError):
    """The client was too slow in sending its request."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


class PayloadTooLarge(HeadraceError):
    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class UnsupportedMediaType(HeadraceError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class Overloaded(HeadraceError):
    """Said early, before any work: the client may come back after `retry_after_s`."""

    status = 429
    type = "overloaded_error"
    code = "overloaded"
    may_go_elsewhere = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(Overloaded):
    """No replica that could take the request is routable now."""

    status = 503
    type = "unavailable_error"
    code = "no_replica"


class DeadlineExceeded(HeadraceError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class Cancelled(HeadraceError):
    """The client left or withdrew the request; nobody is waiting for this answer."""

    status = 499
    type = "cancelled"
    code = "cancelled"


class ReplicaLost(HeadraceError):
    """The replica that owned the request died and the request could not be continued."""

    status = 502
    type = "replica_error"
    code = "replica_lost"
    may_go_elsewhere = True


class PicturesMissing(HeadraceError):
    """Rows of a picture that a run needs are not in the store, or do not verify. Another attempt
    has them made again first."""

    status = 503
    type = "unavailable_error"
    code = "pictures_missing"
    may_go_elsewhere = True


class StateDamaged(HeadraceError):
    """Bytes that a hand-off promised did not verify and could not be made again in time."""

    status = 500
    type = "internal_error"
    code = "state_damaged"


class ConfigError(HeadraceError):
    """A configuration that must not start. The message names key, bound and value."""

    code = "config_error"


class WireError(HeadraceError):
    """A frame that cannot be accepted; the connection it came from is closed."""

    code = "wire_error"


class IllegalTransition(HeadraceError):
    """A (state, event) pair that no state table allows: a bug in the sender or in us."""

    code = "illegal_transition"


ERRORS_BY_CODE: dict[str, type[HeadraceError]] = {
    cls.code: cls
    for cls in (
        HeadraceError,
        InvalidRequest,
        LimitExceeded,
        Unauthorized,
        NotFound,
        RequestTimeout,
        PayloadTooLarge,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        ReplicaLost,
        PicturesMissing,
        StateDamaged,
        ConfigError,
        WireError,
    )
}


def from_code(code: str, message: str) -> HeadraceError:
    """The error a peer reported by code over the wire; an unknown code becomes an internal one."""
    return ERRORS_BY_CODE.get(code, HeadraceError)(message)
