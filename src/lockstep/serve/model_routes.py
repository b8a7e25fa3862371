"""The routes that ask the model's tokenizer or its description, but generate nothing."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from lockstep.serve.answers import Json
from lockstep.serve.bodies import parse
from lockstep.serve.errors import invalid
from lockstep.serve.logprobs import TokenNames
from lockstep.serve.prompts import check_token_ids, encode_chat, encode_prompt, off_loop_if_large
from lockstep.serve.service import ServedModel, Service
from lockstep.serve.wire import DetokenizeRequest, TokenizeRequest


async def list_models(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    model = service.model()
    cards = [_card(name, model) for name in service.names]
    return JSONResponse({"object": "list", "data": cards})


async def show_model(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    model = service.model()
    name = http.path_params["name"]
    service.check_name(name)
    return JSONResponse(_card(name, model))


async def tokenize(http: HttpRequest) -> Response:
    """Text or messages (through the chat template, with the generation prompt) to token ids."""
    service: Service = http.app.state.service
    model = service.model()
    request = await parse(http, TokenizeRequest, limit_bytes=service.config.max_body_bytes)
    service.check_name(request.model)
    if request.prompt is not None and request.messages is not None:
        raise invalid("give either prompt or messages, not both", param="messages")
    if request.prompt is None:
        prompt = await encode_chat(request, model.tokenizer)
    else:
        prompt = await encode_prompt(
            request.prompt,
            model.tokenizer,
            vocab_size=model.vocab_size,
            add_special_tokens=request.add_special_tokens is not False,
        )
    names = TokenNames(model.tokenizer)
    return JSONResponse(
        {
            "count": len(prompt.token_ids),
            "max_model_len": model.max_model_len,
            "tokens": list(prompt.token_ids),
            "token_strs": list(map(names, prompt.token_ids)) if request.return_token_strs else None,
        }
    )


async def detokenize(http: HttpRequest) -> Response:
    """Token ids to text, special tokens spelled out."""
    service: Service = http.app.state.service
    model = service.model()
    request = await parse(http, DetokenizeRequest, limit_bytes=service.config.max_body_bytes)
    service.check_name(request.model)
    check_token_ids(request.tokens, model.vocab_size, param="tokens")
    text = await off_loop_if_large(
        len(request.tokens),
        lambda: model.tokenizer.decode(request.tokens, skip_special_tokens=False),
    )
    return JSONResponse({"prompt": text})


def _card(name: str, model: ServedModel) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "lockstep",
        "root": model.root,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
