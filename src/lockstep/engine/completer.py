"""An in-process engine behind the Completer protocol that evaluation and RL speak."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.core.completer import Message, Prompt
from lockstep.core.errors import RequestError
from lockstep.core.records import Completion
from lockstep.core.sampling import SamplingParams
from lockstep.engine.engine import Engine
from lockstep.engine.request import Request

_SCORE_ONLY = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0)


class EngineCompleter:
    """See `lockstep.core.completer.Completer`."""

    def __init__(self, engine: Engine, *, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    @property
    def model_name(self) -> str:
        return self._model_name

    def complete(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_finish: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        return self._engine.generate(prompts, params, on_finish=on_finish)

    def chat_prompt(self, messages: Sequence[Message]) -> Prompt:
        """Token ids: the template spells out every special token itself."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise RequestError(
                f"{self._model_name} has no chat template; give prompts as text or token ids",
                param="messages",
            )
        text = tokenizer.chat_template.render(messages, add_generation_prompt=True)
        return tokenizer.encode(text)

    def score(self, pairs: Sequence[tuple[Prompt, str]]) -> list[list[float]]:
        """A text prompt is tokenised together with its continuation, as lm-eval does it. What
        several pairs have in common is computed once.
        """
        requests: list[Request] = []
        starts: list[int] = []
        first_with: dict[tuple[int, ...], str] = {}
        for number, (prompt, continuation) in enumerate(pairs):
            context = self._engine.encode(prompt)
            starts.append(len(context))
            request_id = f"score-{number}"
            leader = first_with.setdefault(tuple(context), request_id)
            requests.append(
                Request(
                    request_id=request_id,
                    shares_prefix_with=None if leader == request_id else leader,
                    prompt_token_ids=self._joined(prompt, context, continuation),
                    params=_SCORE_ONLY,
                    prompt_logprobs_start=len(context),
                )
            )
        completions = self._engine.run(requests)
        return [
            [entry.logprob for entry in (completion.prompt_logprobs or ())[start:] if entry]
            for completion, start in zip(completions, starts, strict=True)
        ]

    def _joined(self, prompt: Prompt, context: Sequence[int], continuation: str) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._engine.encode(prompt + continuation)
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError("a text continuation needs a tokenizer; this engine has none")
        return [*context, *tokenizer.encode(continuation)]
