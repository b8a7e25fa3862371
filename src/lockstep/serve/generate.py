"""`/v1/chat/completions` and `/v1/completions`: a parsed request to a whole or streamed answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from lockstep.engine.request import Request
from lockstep.serve.answers import Answer, ChoiceKey, Head, Json, Usage
from lockstep.serve.bodies import parse
from lockstep.serve.chat_answer import ChatAnswer
from lockstep.serve.completion_answer import CompletionAnswer
from lockstep.serve.defaults import sampling_params
from lockstep.serve.errors import invalid
from lockstep.serve.logprobs import TokenNames
from lockstep.serve.prompts import (
    ParsedPrompt,
    check_token_ids,
    encode_chat,
    encode_prompt,
    split_prompts,
)
from lockstep.serve.service import ServedModel, Service
from lockstep.serve.sse import DONE, EventStream, event, run_for
from lockstep.serve.streams import DeltaBuffer, Generations
from lockstep.serve.wire import ChatRequest, CompletionRequest, GenerationRequest

MAX_CHOICES = 1024
"""Prompts times n in one HTTP request."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A valid request, ready to run: an engine request for each prompt, and the answer to fill."""

    requests: Sequence[Request]
    answer: Answer
    usage: Usage
    stream: bool
    include_usage: bool
    continuous_usage: bool


async def chat_completions(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    model = service.model()
    request = await parse(http, ChatRequest, limit_bytes=service.config.max_body_bytes)
    service.check_name(request.model)
    prompt = await encode_chat(request, model.tokenizer)
    head = _head("chatcmpl", service, model)
    answer = ChatAnswer(request, prompt, head=head, names=_names(request, model))
    return await _respond(http, service, model, _job(request, model, [prompt], answer))


async def completions(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    model = service.model()
    request = await parse(http, CompletionRequest, limit_bytes=service.config.max_body_bytes)
    service.check_name(request.model)
    entries = split_prompts(request.prompt)
    if len(entries) * (request.n or 1) > MAX_CHOICES:
        message = f"{len(entries)} prompts times n={request.n} is more than {MAX_CHOICES} choices"
        raise invalid(message, param="n")
    adds_special = request.add_special_tokens is not False
    prompts = [
        await encode_prompt(
            entry, model.tokenizer, vocab_size=model.vocab_size, add_special_tokens=adds_special
        )
        for entry in entries
    ]
    head = _head("cmpl", service, model)
    names = _names(request, model)
    answer = CompletionAnswer(request, prompts, model.tokenizer, head=head, names=names)
    return await _respond(http, service, model, _job(request, model, prompts, answer))


def _job(
    request: GenerationRequest, model: ServedModel, prompts: Sequence[ParsedPrompt], answer: Answer
) -> Job:
    check_token_ids(request.stop_token_ids or [], model.vocab_size, param="stop_token_ids")
    requests = []
    for number, prompt in enumerate(prompts):
        params = sampling_params(
            request,
            model.defaults,
            prompt_tokens=len(prompt.token_ids),
            max_model_len=model.max_model_len,
        )
        check_token_ids(list(params.logit_bias), model.vocab_size, param="logit_bias")
        requests.append(
            Request(
                request_id=f"{answer.head.id}-{number}",
                prompt_token_ids=prompt.token_ids,
                params=params,
                priority=request.priority or 0,
            )
        )
    options = request.stream_options
    return Job(
        requests=requests,
        answer=answer,
        usage=Usage([len(prompt.token_ids) for prompt in prompts]),
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )


async def _respond(http: HttpRequest, service: Service, model: ServedModel, job: Job) -> Response:
    if job.stream:
        return EventStream(_events(service, model, job))
    return JSONResponse(await run_for(http, _whole(service, model, job)))


async def _whole(service: Service, model: ServedModel, job: Job) -> Json:
    samples: dict[ChoiceKey, DeltaBuffer] = {}
    async with _generations(service, model, job) as generations:
        async for number, delta in generations:
            job.usage.add(number, delta)
            samples.setdefault((number, delta.index), DeltaBuffer()).push(delta)
    whole = job.answer.whole({key: buffer.joined() for key, buffer in samples.items()})
    return whole | {"usage": job.usage.body()}


async def _events(service: Service, model: ServedModel, job: Job) -> AsyncGenerator[bytes, None]:
    """The stream: chunks as tokens come, the usage if asked for, and [DONE]."""
    async with _generations(service, model, job) as generations:
        async for number, delta in generations:
            job.usage.add(number, delta)
            for chunk in job.answer.chunks(number, delta):
                yield event(_with_usage(chunk, job))
    if job.include_usage:
        yield event(job.answer.head.of(job.answer.chunk_kind, []) | {"usage": job.usage.body()})
    yield DONE


def _with_usage(chunk: Json, job: Job) -> Json:
    """OpenAI sends `usage: null` in all chunks but the last when usage is asked for."""
    if job.continuous_usage:
        return chunk | {"usage": job.usage.body()}
    return chunk | {"usage": None} if job.include_usage else chunk


@asynccontextmanager
async def _generations(
    service: Service, model: ServedModel, job: Job
) -> AsyncGenerator[Generations, None]:
    listeners = [
        service.metrics.request_timer(len(request.prompt_token_ids)) for request in job.requests
    ]
    service.num_in_flight += 1
    try:
        async with Generations(model.engine, job.requests, listeners) as generations:
            yield generations
    finally:
        service.num_in_flight -= 1


def _head(prefix: str, service: Service, model: ServedModel) -> Head:
    return Head(
        prefix=prefix,
        model=service.names[0],
        system_fingerprint=model.system_fingerprint,
    )


def _names(request: GenerationRequest, model: ServedModel) -> TokenNames:
    return TokenNames(model.tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
