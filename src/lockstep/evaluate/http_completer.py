"""A Completer over HTTP: our server's, or anybody's that speaks OpenAI's completions API.

Servers that follow vLLM (ours does) are known by `max_model_len` in `/v1/models`. They render chats
and tokenise for us, take every sampling parameter, and return token ids, so a result holds all that
the in-process engine's does. From a plain OpenAI server come text and logprobs only (`token_ids`
are empty), chats are sent as messages, and parameters outside OpenAI's API are refused here rather
than lost there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from typing import TypeVar

from lockstep.core.completer import Message, Prompt
from lockstep.core.errors import ConfigError
from lockstep.core.records import Completion, Sample, TokenLogprob
from lockstep.core.sampling import SamplingParams
from lockstep.evaluate.http_transport import Json, Transport

Job = TypeVar("Job")
Result = TypeVar("Result")

STANDARD = (
    "max_tokens",
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "logit_bias",
    "logprobs",
)
"""SamplingParams that OpenAI's completions API knows by the same name."""

TOKEN_ID = "token_id:"
"""How vLLM names tokens under `return_tokens_as_token_ids`."""

ALWAYS_SENT = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sent even at their defaults: a server may have other ones, from the model's generation config."""


class RemoteChat(str):
    """A conversation as a prompt for a server that keeps its chat template to itself."""

    messages: list[Message]

    def __new__(cls, messages: Sequence[Message]) -> RemoteChat:
        text = super().__new__(cls, "\n".join(f"{m['role']}: {m['content']}" for m in messages))
        text.messages = list(messages)
        return text


class HttpCompleter:
    """Sends up to `max_concurrency` requests at a time; the server batches them."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        max_concurrency: int = 16,
        timeout_s: float = 600.0,
    ) -> None:
        """`base_url` with or without its `/v1`; `model` defaults to the first the server lists."""
        self._transport = Transport(base_url, api_key=api_key, timeout_s=timeout_s)
        self._max_concurrency = max_concurrency
        self._asked_model = model

    @property
    def model_name(self) -> str:
        return str(self._card["id"])

    def complete(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_finish: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(f"got {len(each)} sampling params for {len(prompts)} prompts")
        jobs = list(zip(prompts, each, strict=True))
        return self._in_parallel(lambda job: self._complete_one(*job), jobs, on_finish)

    def chat_prompt(self, messages: Sequence[Message]) -> Prompt:
        """Token ids where the server can render them, else the messages in a `RemoteChat`."""
        if not self._has_extensions:
            return RemoteChat(messages)
        body = {"messages": list(messages), "add_generation_prompt": True}
        return self._tokenize(body)

    def score(self, pairs: Sequence[tuple[Prompt, str]]) -> list[list[float]]:
        """Each text prompt is tokenised together with its continuation, as lm-eval does it."""
        return self._in_parallel(lambda pair: self._score_one(*pair), pairs, None)

    @cached_property
    def _card(self) -> Json:
        cards: list[Json] = self._transport.call("GET", "/v1/models")["data"]
        for card in cards:
            if self._asked_model in (None, card["id"]):
                return card
        known = ", ".join(str(card["id"]) for card in cards) or "none"
        raise ConfigError(f"the server has no model {self._asked_model!r}; it has {known}")

    @property
    def _has_extensions(self) -> bool:
        return "max_model_len" in self._card

    def _complete_one(self, prompt: Prompt, params: SamplingParams) -> Completion:
        body: Json = {"model": self.model_name} | self._sampling_body(params)
        if isinstance(prompt, RemoteChat):
            if body.pop("logprobs", None) is not None:
                body |= {"logprobs": True, "top_logprobs": params.logprobs}
            answer = self._transport.call(
                "POST", "/v1/chat/completions", body | {"messages": prompt.messages}
            )
            return _completion(answer, (), params)
        given = prompt if isinstance(prompt, str) else list(prompt)
        answer = self._transport.call("POST", "/v1/completions", body | {"prompt": given})
        return _completion(answer, () if isinstance(given, str) else tuple(given), params)

    def _sampling_body(self, params: SamplingParams) -> Json:
        """Only what differs from the defaults, so that the plainest server understands it."""
        neutral = SamplingParams()
        changed = {
            name: value
            for name, value in vars(params).items()
            if value != getattr(neutral, name) or name in ALWAYS_SENT
        }
        if self._has_extensions:
            changed["return_token_ids"] = True
            if params.logprobs is not None:
                changed["return_tokens_as_token_ids"] = True
        else:
            foreign = [
                name
                for name, value in changed.items()
                if name not in STANDARD and value != getattr(neutral, name)
            ]
            if foreign:
                message = f"this server takes OpenAI's parameters only, not {', '.join(foreign)}"
                raise ConfigError(message)
            changed = {name: value for name, value in changed.items() if name in STANDARD}
        if "logit_bias" in changed:
            changed["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        return changed

    def _score_one(self, prompt: Prompt, continuation: str) -> list[float]:
        if isinstance(prompt, RemoteChat):
            raise ConfigError(
                "this server cannot score a continuation of a chat; use a text prompt"
            )
        body: Json = {
            "model": self.model_name,
            "max_tokens": 1,
            "temperature": 0.0,
            "echo": True,
            "logprobs": 1,
        }
        if not self._has_extensions:
            if not isinstance(prompt, str):
                raise ConfigError("this server has no tokenizer route; score text prompts only")
            return self._score_text(prompt, continuation, body)
        if isinstance(prompt, str):
            context = self._tokenize({"prompt": prompt})
            whole = self._tokenize({"prompt": prompt + continuation})
        else:
            context = list(prompt)
            tail = self._tokenize({"prompt": continuation, "add_special_tokens": False})
            whole = context + tail
        answer = self._transport.call("POST", "/v1/completions", body | {"prompt": whole})
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        return [float(value) for value in logprobs[len(context) : len(whole)]]

    def _score_text(self, prompt: str, continuation: str, body: Json) -> list[float]:
        """Without token ids: the tokens that start inside the continuation's characters."""
        text = prompt + continuation
        answer = self._transport.call("POST", "/v1/completions", body | {"prompt": text})
        logprobs = answer["choices"][0]["logprobs"]
        return [
            float(value)
            for value, at in zip(logprobs["token_logprobs"], logprobs["text_offset"], strict=True)
            if len(prompt) <= at < len(text)
        ]

    def _tokenize(self, body: Json) -> list[int]:
        answer = self._transport.call("POST", "/tokenize", {"model": self.model_name} | body)
        return [int(token) for token in answer["tokens"]]

    def _in_parallel(
        self,
        work: Callable[[Job], Result],
        jobs: Sequence[Job],
        on_finish: Callable[[int], None] | None,
    ) -> list[Result]:
        """Results in order; the first failure cancels what has not started and is raised."""
        pool = ThreadPoolExecutor(self._max_concurrency)
        try:
            futures = {pool.submit(work, job): number for number, job in enumerate(jobs)}
            for future in as_completed(futures):
                future.result()
                if on_finish:
                    on_finish(futures[future])
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _completion(answer: Json, prompt_ids: tuple[int, ...], params: SamplingParams) -> Completion:
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    first = choices[0]
    ids = first.get("prompt_token_ids") or answer.get("prompt_token_ids") or prompt_ids
    entries = first.get("prompt_logprobs") or answer.get("prompt_logprobs")
    details = answer.get("usage", {}).get("prompt_tokens_details") or {}
    return Completion(
        request_id=str(answer["id"]),
        prompt_token_ids=tuple(ids),
        samples=tuple(_sample(choice, params) for choice in choices),
        prompt_logprobs=_prompt_logprobs(entries, ids) if entries else None,
        num_cached_tokens=int(details.get("cached_tokens") or 0),
    )


def _sample(choice: Json, params: SamplingParams) -> Sample:
    message = choice.get("message")
    reason = choice["finish_reason"]
    return Sample(
        index=int(choice["index"]),
        text=choice["text"] if message is None else message.get("content") or "",
        token_ids=tuple(choice.get("token_ids") or ()),
        logprobs=_logprobs(choice.get("logprobs") or {}),
        finish_reason=reason if reason in ("stop", "length") else "abort",
        stop_reason=choice.get("stop_reason"),
        seed=int(choice.get("seed") or params.seed or 0),
    )


def _logprobs(wire: Json) -> tuple[TokenLogprob, ...]:
    """Empty unless the server named tokens by id (`token_id:N`)."""
    names = wire.get("tokens") or ()
    if not names or not all(str(name).startswith(TOKEN_ID) for name in names):
        return ()
    count = len(names)
    drawn = wire.get("sampling_logprobs") or [None] * count
    tops = wire.get("top_logprobs") or [None] * count
    return tuple(
        TokenLogprob(
            token_id=_id_of(name), logprob=logprob, sampling_logprob=sampling, top=_top(top or {})
        )
        for name, logprob, sampling, top in zip(
            names, wire["token_logprobs"], drawn, tops, strict=True
        )
    )


def _top(wire: Json) -> tuple[tuple[int, float], ...]:
    return tuple((_id_of(name), float(value)) for name, value in wire.items())


def _prompt_logprobs(
    entries: Sequence[Json | None], ids: Sequence[int]
) -> tuple[TokenLogprob | None, ...]:
    """vLLM's form: for each token a map from id (as a string) to logprob and rank."""
    return tuple(
        None
        if entry is None
        else TokenLogprob(
            token_id=token,
            logprob=float(entry[str(token)]["logprob"]),
            rank=entry[str(token)]["rank"],
            top=tuple((int(other), float(value["logprob"])) for other, value in entry.items()),
        )
        for token, entry in zip(ids, entries, strict=True)
    )


def _id_of(name: str) -> int:
    return int(name.removeprefix(TOKEN_ID))
