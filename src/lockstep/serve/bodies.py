"""From bytes on the wire to a validated request: content type, size limit, JSON, types.

Reads with a limit and a deadline, so neither a huge nor a trickling body can hold memory or a task
for long.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from lockstep.serve.errors import ApiError, invalid
from lockstep.serve.fields import check_extra_fields
from lockstep.serve.wire import WireModel

BODY_TIMEOUT_S = 60.0
DRAIN_FACTOR = 4
"""How many times the limit is read and dropped, so that the client gets to read the refusal."""

Wire = TypeVar("Wire", bound=WireModel)


async def parse(request: Request, kind: type[Wire], *, limit_bytes: int) -> Wire:
    """The body as `kind`, or ApiError 400, 408, 413 or 415."""
    return parse_bytes(await read_json(request, limit_bytes=limit_bytes), kind)


async def read_json(request: Request, *, limit_bytes: int) -> bytes:
    """The raw body of a request that says it is JSON."""
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip()
    if content_type.lower() != "application/json" and not content_type.lower().endswith("+json"):
        raise ApiError(
            415,
            f"content-type is {content_type!r}; send application/json",
            code="unsupported_media_type",
        )
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(request, limit_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, message, headers={"Connection": "close"}) from None


def parse_bytes(body: bytes, kind: type[Wire]) -> Wire:
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _as_api_error(error) from None
    check_extra_fields(parsed)
    return parsed


async def _read(request: Request, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= limit_bytes:
            pieces.append(piece)
        elif size > DRAIN_FACTOR * limit_bytes:
            break
    if size > limit_bytes:
        raise ApiError(
            413,
            f"the body has more than {limit_bytes} bytes, the limit here (--max-body-mib)",
            code="body_too_large",
            headers={"Connection": "close"},
        )
    return b"".join(pieces)


def _as_api_error(error: ValidationError) -> ApiError:
    """What pydantic found wrong with the first faulty field, as one sentence that names it."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    first = faults[0]
    if first["type"] == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        return invalid(f"the body is not valid JSON: {reason}", code="invalid_json")
    if not first["loc"]:
        return invalid("the body must be a JSON object", code="invalid_type")
    field = str(first["loc"][0])
    if first["type"] == "missing":
        where = ".".join(map(str, first["loc"]))
        return invalid(f"{where} is missing", param=field, code="missing_field")
    # Each branch of a union reports its own fault; together they say what would be right.
    wanted = dict.fromkeys(
        fault["msg"].removeprefix("Input should be ")
        for fault in faults
        if fault["loc"][0] == field
    )
    message = f"{field} should be {' or '.join(wanted)}"[:500]
    return invalid(message, param=field, code="invalid_type")
