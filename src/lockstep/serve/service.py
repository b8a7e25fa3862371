"""What the routes act on: the configuration, the model once it is loaded, and the server's phase.

loading --(model ready)--> ready --(SIGTERM)--> draining
   `--(loading failed, engine died)--> failed
"""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from starlette.requests import Request as HttpRequest

from lockstep import __version__
from lockstep.serve.config import HttpConfig
from lockstep.serve.defaults import GenerationDefaults
from lockstep.serve.errors import ApiError, unavailable
from lockstep.serve.metrics import Metrics
from lockstep.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # torch: seconds that pass in the loading thread
    from lockstep.engine.async_engine import AsyncEngine

Phase = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A loaded model and its running engine."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    max_model_len: int
    vocab_size: int
    """Rows of the embedding; token ids below it are valid."""
    root: str
    """Folder or file the weights came from."""
    precision: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def system_fingerprint(self) -> str:
        """Changes whenever the same request and seed may be answered with other bits."""
        return f"lockstep-{__version__}-{self.precision}-w{self.engine.weight_version}"


class Service:
    """One per server; lives in `app.state.service`. Touched from the event loop only."""

    def __init__(
        self, config: HttpConfig, *, names: tuple[str, ...], api_key: str | None = None
    ) -> None:
        """`names` are those the model answers to; the first one is reported."""
        self.config = config
        self.names = names
        self.metrics = Metrics(names[0])
        self.failure: str | None = None
        self.is_draining = False
        self.num_in_flight = 0
        self._api_key = api_key
        self._model: ServedModel | None = None

    @property
    def phase(self) -> Phase:
        if self.failure is not None or (
            self._model is not None and not self._model.engine.is_alive
        ):
            return "failed"
        if self.is_draining:
            return "draining"
        return "loading" if self._model is None else "ready"

    def set_model(self, model: ServedModel) -> None:
        self._model = model
        self.metrics.watch(model.engine)

    def model(self) -> ServedModel:
        """The model, or ApiError 503 that says why there is none."""
        phase = self.phase
        if phase == "ready":
            assert self._model is not None
            return self._model
        reasons = {
            "loading": "the model is still loading; try again when /health answers 200",
            "draining": "the server is shutting down",
            "failed": f"the engine stopped ({self.failure or 'see the log'}); restart the server",
        }
        raise unavailable(reasons[phase], code=phase)

    def check_name(self, name: str | None) -> None:
        """A request that names no model gets the only one there is."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            message = f"the model {name[:200]!r} does not exist; this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_key(self, request: HttpRequest) -> None:
        if self._api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        expected = self._api_key.encode()
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), expected):
            raise ApiError(
                401,
                "wrong or missing API key; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
