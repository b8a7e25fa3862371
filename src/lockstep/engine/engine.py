"""The engine: requests in, deltas out, one scheduler step at a time.

Not thread-safe and without a loop of its own: `AsyncEngine` runs one in a thread. Given the weights
and the request's seed, an answer depends only on the request (docs/architecture.md, contract C1 and
C2). Legend: T packed tokens, D hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count
from math import isnan
from time import perf_counter

from lockstep import kernels
from lockstep.core.completer import Prompt
from lockstep.core.errors import RequestError
from lockstep.core.records import Completion, SampleDelta, TokenLogprob
from lockstep.core.sampling import SamplingParams
from lockstep.engine.active import ActiveRequest, ActiveSample
from lockstep.engine.collector import CompletionCollector
from lockstep.engine.config import EngineConfig
from lockstep.engine.prompt_logprobs import PromptLogprobs, describe_prompts
from lockstep.engine.request import Request, RequestLimits
from lockstep.engine.runner import ModelRunner
from lockstep.engine.sampler import draw_tokens, drawn_tokens
from lockstep.engine.stats import EngineCounters, EngineStats
from lockstep.models.llama import Llama
from lockstep.schedule import Chunk, Scheduler, SequenceSpec, Step
from lockstep.text.tokenizer import Tokenizer

logger = logging.getLogger("lockstep.engine")


class Engine:
    """Runs many requests together on one model."""

    def __init__(
        self, model: Llama, tokenizer: Tokenizer | None, config: EngineConfig | None = None
    ) -> None:
        """Without a tokenizer, prompts are token ids and texts are empty."""
        config = config or EngineConfig()
        schedule = config.scheduler_config(model)
        self.tokenizer = tokenizer
        self.limits = RequestLimits(
            vocab_size=model.config.vocab_size,
            max_model_len=config.model_len(model.config),
            has_tokenizer=tokenizer is not None,
        )
        self.weight_version = 0
        self._eos_token_ids = model.config.eos_token_ids
        self._scheduler = Scheduler(schedule)
        self._runner = ModelRunner(
            model,
            num_blocks=schedule.num_blocks,
            limits=config.step_limits(model.config),
            capture=config.capture,
            kv_format=config.kv_format(model),
        )
        self._counters = EngineCounters()
        self._requests: dict[str, ActiveRequest] = {}
        self._samples: dict[int, ActiveSample] = {}
        self._seq_ids = count()
        self._generate_calls = count()
        self._aborted: list[SampleDelta] = []
        self._num_describing = 0  # requests that want their prompts' logprobs

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._aborted)

    def stats(self) -> EngineStats:
        """May be called from any thread."""
        pool = self._scheduler.tables.pool
        return self._counters.snapshot(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_usage=pool.num_used / pool.num_total,
        )

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError or CapacityError, and then nothing has changed."""
        self.limits.check(request)
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is already running")
        max_new_tokens = self.limits.max_new_tokens(request)
        active = ActiveRequest(request)
        leader = self._leader_of(request)
        for index in range(request.params.n):
            sample = ActiveSample(
                active,
                index=index,
                seq_id=next(self._seq_ids),
                tokenizer=self.tokenizer,
                eos_token_ids=self._eos_token_ids,
                max_new_tokens=max_new_tokens,
                arrived_s=perf_counter(),
            )
            self._scheduler.add(
                SequenceSpec(
                    seq_id=sample.seq_id,
                    prompt_token_ids=active.prompt,
                    max_new_tokens=max_new_tokens,
                    priority=request.priority,
                    leader=leader,
                    namespace=request.namespace,
                    max_cached_tokens=active.max_cached_tokens if index == 0 else None,
                )
            )
            leader = sample.seq_id if index == 0 else leader
            active.open_samples[sample.seq_id] = sample
            self._samples[sample.seq_id] = sample
        self._requests[request.request_id] = active
        self._num_describing += active.prompt_logprobs is not None
        self._counters.prompt_tokens += len(active.prompt)

    def abort(self, request_id: str) -> None:
        """End a request now; its open samples finish with reason `abort` in the next step's deltas.
        A request that is not running (any more) is ignored.
        """
        active = self._forget(request_id)
        if active is None:
            return
        for seq_id, sample in active.open_samples.items():
            self._scheduler.abort(seq_id)
            del self._samples[seq_id]
            self._counters.num_aborted += 1
            self._aborted.append(sample.delta(finish_reason="abort"))

    def step(self) -> list[SampleDelta]:
        """Compute one batch; what it added to each sample, in no particular order of requests."""
        kernels.expect_work()
        aborted, self._aborted = self._aborted, []
        step = self._scheduler.schedule()
        self._note_changes(step)
        if not step.chunks:
            self._scheduler.commit(step, sampled={})
            return aborted
        samples = [self._samples[chunk.seq_id] for chunk in step.chunks if chunk.samples]
        special = [row for row, sample in enumerate(samples) if sample.wants_logits]
        described = self._described_prompts(step)
        outputs = self._runner.run(
            step,
            [sample.row_sampling for sample in samples],
            keeps_logits=bool(special),
            keeps_hidden=bool(described),
        )
        if described:
            assert outputs.hidden_TD is not None
            describe_prompts(self._runner, outputs.hidden_TD, described)
        tokens = drawn_tokens(outputs)
        if special:
            draws = [samples[row].draw() for row in special]
            for row, token in zip(
                special, draw_tokens(outputs.logits_of(special), draws), strict=True
            ):
                tokens[row] = token
        deltas = self._grow(samples, tokens) + self._end_scored_prompts(step)
        self._scheduler.commit(
            step,
            sampled={s.seq_id: token.token_id for s, token in zip(samples, tokens, strict=True)},
            finished=self._close_finished(deltas),
        )
        return aborted + [delta for _, delta in deltas]

    def weights_updated(self, version: int) -> None:
        """The model's parameters were changed: nothing computed with the old ones is used again.
        Requests under way keep their tokens and are computed anew.
        """
        self.weight_version = version
        self._scheduler.clear_cache(recompute=True)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_finish: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Run prompts to the end; `on_finish(i)` as each is done. Raises RequestError before any
        work starts if one of them is invalid. Text prompts get the tokenizer's special tokens.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        call = next(self._generate_calls)
        return self.run(
            [
                Request(
                    request_id=f"generate-{call}-{number}",
                    prompt_token_ids=self.encode(prompt),
                    params=prompt_params,
                )
                for number, (prompt, prompt_params) in enumerate(zip(prompts, each, strict=True))
            ],
            on_finish=on_finish,
        )

    def run(
        self, requests: Sequence[Request], *, on_finish: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """The same for whole requests; their order is that of the results."""
        assert not self.has_work, "other requests are under way; their deltas would be lost"
        for request in requests:
            self.limits.check(request)
        numbers = {request.request_id: number for number, request in enumerate(requests)}
        collectors = [CompletionCollector(request) for request in requests]
        try:
            for request in requests:
                self.add_request(request)
            while self.has_work:
                for delta in self.step():
                    number = numbers[delta.request_id]
                    if collectors[number].push(delta) and on_finish is not None:
                        on_finish(number)
        finally:
            for request in requests:
                self.abort(request.request_id)
            self._aborted.clear()
        return [collector.completion(self.weight_version) for collector in collectors]

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt; ids stay as they are."""
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer; this engine has none")
        return self.tokenizer.encode(prompt, add_special_tokens=True)

    def _leader_of(self, request: Request) -> int | None:
        """First sample of the request whose prefix it shares, if that is still under way."""
        if request.shares_prefix_with not in self._requests:
            return None
        return next(iter(self._requests[request.shares_prefix_with].open_samples))

    def _note_changes(self, step: Step) -> None:
        self._counters.num_steps += 1
        self._counters.num_preemptions += len(step.preempted)
        now = perf_counter() if step.admitted else 0.0
        for admission in step.admitted:
            self._counters.prefix_queries += admission.num_tokens
            self._counters.prefix_hits += admission.num_cached_tokens
            sample = self._samples[admission.seq_id]
            if sample.started_s is None:
                sample.started_s = now
                self._counters.queue_s += now - sample.arrived_s
                if sample.index == 0:
                    sample.request.num_cached_tokens = admission.num_cached_tokens

    def _described_prompts(self, step: Step) -> list[tuple[PromptLogprobs, Chunk, int]]:
        """Whose prompt logprobs a step computes, by which chunk, from which packed token on."""
        if not self._num_describing:
            return []
        wanted, offset = [], 0
        for chunk in step.chunks:
            sample = self._samples[chunk.seq_id]
            prompt_logprobs = sample.request.prompt_logprobs
            if sample.index == 0 and prompt_logprobs and prompt_logprobs.targets(chunk):
                wanted.append((prompt_logprobs, chunk, offset))
            offset += chunk.num_tokens
        return wanted

    def _grow(
        self, samples: Sequence[ActiveSample], tokens: Sequence[TokenLogprob]
    ) -> list[tuple[ActiveSample, SampleDelta]]:
        """Add what was drawn to each sample."""
        now, deltas = perf_counter(), []
        for sample, token in zip(samples, tokens, strict=True):
            if isnan(token.logprob):
                deltas.append((sample, self._fail(sample)))
                continue
            deltas.append((sample, sample.push(token)))
            if sample.first_token_s is None:
                self._note_first_token(sample, now)
        self._counters.generation_tokens += len(samples)
        return deltas

    def _end_scored_prompts(self, step: Step) -> list[tuple[ActiveSample, SampleDelta]]:
        """Samples of no tokens end with their prompt."""
        deltas, now = [], perf_counter()
        for chunk in step.chunks:
            if chunk.samples:
                continue
            sample = self._samples[chunk.seq_id]
            if sample.max_new_tokens == 0 and chunk.end == len(sample.request.prompt):
                deltas.append((sample, sample.delta(finish_reason="length")))
                self._note_first_token(sample, now)
        return deltas

    def _fail(self, sample: ActiveSample) -> SampleDelta:
        """What cannot be drawn from ends alone: rows know nothing of each other."""
        position = sample.draw().position
        reason = f"the model's logits at position {position} are not finite numbers"
        request_id = sample.request.request.request_id
        logger.error("request %s, sample %d: %s", request_id, sample.index, reason)
        return sample.fail(reason)

    def _note_first_token(self, sample: ActiveSample, now: float) -> None:
        if sample.started_s is not None:
            sample.first_token_s = now
            self._counters.prefill_s += now - sample.started_s

    def _close_finished(self, deltas: Sequence[tuple[ActiveSample, SampleDelta]]) -> list[int]:
        finished = [sample for sample, delta in deltas if delta.finish_reason is not None]
        now = perf_counter() if finished else 0.0
        for sample in finished:
            active = sample.request
            del self._samples[sample.seq_id]
            del active.open_samples[sample.seq_id]
            if not active.open_samples:
                self._forget(active.request.request_id)
            self._counters.num_finished += 1
            self._counters.decode_s += now - (sample.first_token_s or now)
        return [sample.seq_id for sample in finished]

    def _forget(self, request_id: str) -> ActiveRequest | None:
        active = self._requests.pop(request_id, None)
        if active is not None and active.prompt_logprobs is not None:
            self._num_describing -= 1
        return active
