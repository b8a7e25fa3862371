"""Routes for operators and load balancers: they answer at once, in every phase, without a key."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from lockstep import __version__
from lockstep.serve.metrics import CONTENT_TYPE
from lockstep.serve.service import Service


async def health(http: HttpRequest) -> Response:
    """200 when a request sent now would be answered; otherwise 503 and the reason."""
    service: Service = http.app.state.service
    service.model()
    return JSONResponse({"status": service.phase})


async def version(http: HttpRequest) -> Response:
    return JSONResponse({"version": __version__})


async def load(http: HttpRequest) -> Response:
    """Generation requests under way, as vLLM counts them."""
    service: Service = http.app.state.service
    return JSONResponse({"server_load": service.num_in_flight})


async def metrics(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE)
