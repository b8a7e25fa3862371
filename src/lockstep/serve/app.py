"""The ASGI application: routes, who may call them, and what errors look like."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from lockstep.core.errors import LockstepError
from lockstep.serve import errors, generate, model_routes, service_routes
from lockstep.serve.service import Service

Handler = Callable[[HttpRequest], Awaitable[Response]]


def build_app(service: Service) -> Starlette:
    """The routes over `service`; the caller loads its model and runs the app."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", _guarded(generate.chat_completions), methods=["POST"]),
            Route("/v1/completions", _guarded(generate.completions), methods=["POST"]),
            Route("/v1/models", _guarded(model_routes.list_models)),
            Route("/v1/models/{name:path}", _guarded(model_routes.show_model)),
            Route("/tokenize", _guarded(model_routes.tokenize), methods=["POST"]),
            Route("/detokenize", _guarded(model_routes.detokenize), methods=["POST"]),
            Route("/health", service_routes.health),
            Route("/ping", service_routes.health, methods=["GET", "POST"]),
            Route("/version", service_routes.version),
            Route("/load", service_routes.load),
            Route("/metrics", service_routes.metrics),
        ],
        exception_handlers={
            errors.ApiError: errors.on_api_error,
            LockstepError: errors.on_lockstep_error,
            HTTPException: errors.on_http_exception,
            ClientDisconnect: errors.on_disconnect,
            Exception: errors.on_bug,
        },
    )
    app.state.service = service
    return app


def _guarded(handler: Handler) -> Handler:
    """Routes that use the model want the API key, if the server has one."""

    async def checked(http: HttpRequest) -> Response:
        http.app.state.service.check_key(http)
        return await handler(http)

    return checked
