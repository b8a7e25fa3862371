"""Every answer that is not a success: OpenAI's nested error body with the right status.

`ApiError` is what handlers raise; `as_api_error` turns the typed errors of the lower layers into
one. Clients branch on `status` and `code`, people read `message`, `param` names the field at fault.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lockstep.core.errors import CapacityError, LockstepError, RequestError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request that gets an error body instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, _KINDS[400 if self.status < 500 else 500])
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, code: str = "not_ready") -> ApiError:
    """503: the same request may succeed later."""
    return ApiError(503, message, code=code, headers={"Retry-After": "1"})


def as_api_error(error: LockstepError) -> ApiError:
    """The client's own mistakes become 400; anything else a lower layer names is ours, 500."""
    if isinstance(error, RequestError):
        return invalid(str(error), param=error.param, code=error.code)
    if isinstance(error, CapacityError):
        return invalid(str(error), code="capacity_exceeded")
    return ApiError(500, str(error))


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def on_lockstep_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LockstepError)
    return as_api_error(error).response()


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method), in the same body."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = {
        404: f"there is no {path} here; docs/serve.md lists the routes",
        405: f"{request.method} is not allowed on {path}",
    }.get(error.status_code, str(error.detail) or HTTPStatus(error.status_code).phrase)
    headers = dict(error.headers or {})
    return ApiError(error.status_code, message, headers=headers).response()


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client went while its body was read or its answer made: nobody reads this."""
    return Response(status_code=499)


async def on_bug(request: Request, error: Exception) -> Response:
    """A bug of ours: one sentence to the client; uvicorn logs the traceback."""
    return ApiError(500, "internal error; the server's log has the traceback").response()
