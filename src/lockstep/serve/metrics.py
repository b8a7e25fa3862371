"""Prometheus metrics, under vLLM's names where the meaning is the same.

Counters and histograms are fed as requests run; what only the engine knows is read from it when
scraped. Every metric has the label `model_name`. docs/serve.md lists them with their meaning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lockstep.core.records import SampleDelta
from lockstep.engine.stats import EngineStats

if TYPE_CHECKING:  # torch: seconds that pass in the loading thread
    from lockstep.engine.async_engine import AsyncEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success",
            "Samples finished, by reason (stop, length, abort).",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        histogram = self._histogram
        self.first_token_s = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", REQUEST_BUCKETS_S
        )
        self.inter_token_s = histogram(
            "inter_token_latency_seconds", "Between tokens of one sample.", STEP_BUCKETS_S
        )
        self.e2e_s = histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS_S
        )
        self.decode_s = histogram(
            "request_decode_time_seconds", "First token to last.", REQUEST_BUCKETS_S
        )
        self.prompt_lengths = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS
        )
        self.generation_lengths = histogram(
            "request_generation_tokens", "Tokens of a finished sample.", TOKEN_BUCKETS
        )

    def watch(self, engine: AsyncEngine) -> None:
        """Read `engine`'s gauges at every scrape from now on."""
        self._registry.register(_EngineCollector(engine.stats, self._model_name))

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def request_timer(self, num_prompt_tokens: int) -> RequestTimer:
        """Call when the request arrives."""
        self.prompt_tokens.inc(num_prompt_tokens)
        self.prompt_lengths.observe(num_prompt_tokens)
        return RequestTimer(self)

    def finished(self, reason: str) -> Counter:
        return self._success.labels(self._model_name, reason)

    def _counter(self, name: str, help_text: str) -> Counter:
        counter = Counter(f"vllm:{name}", help_text, ("model_name",), registry=self._registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", help_text, ("model_name",), buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._model_name)


class RequestTimer:
    """Times one engine request; each of its n samples counts as a request, as in vLLM."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = time.perf_counter()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}

    def on_delta(self, delta: SampleDelta) -> None:
        now, index = time.perf_counter(), delta.index
        if delta.token_ids:
            self._metrics.generation_tokens.inc(len(delta.token_ids))
            self._num_tokens[index] = self._num_tokens.get(index, 0) + len(delta.token_ids)
            if index not in self._first:
                self._first[index] = now
                self._metrics.first_token_s.observe(now - self._arrived)
            else:
                self._metrics.inter_token_s.observe(now - self._last[index])
            self._last[index] = now
        if delta.finish_reason is not None:
            self._metrics.finished(delta.finish_reason).inc()
            self._metrics.e2e_s.observe(now - self._arrived)
            self._metrics.decode_s.observe(now - self._first.get(index, now))
            self._metrics.generation_lengths.observe(self._num_tokens.get(index, 0))

    def on_abort(self) -> None:
        self._metrics.finished("abort").inc()


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = {
            "num_requests_running": (stats.num_running, "Sequences that hold KV blocks."),
            "num_requests_waiting": (stats.num_waiting, "Sequences that wait for KV blocks."),
            "kv_cache_usage_perc": (stats.kv_usage, "Share of KV blocks in use, 0 to 1."),
        }
        counters = {
            "prefix_cache_queries": (stats.prefix_queries, "Tokens looked up in the prefix cache."),
            "prefix_cache_hits": (stats.prefix_hits, "Tokens found in the prefix cache."),
            "num_preemptions": (stats.num_preemptions, "Sequences preempted for lack of blocks."),
        }
        for name, (value, help_text) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, (value, help_text) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        started = stats.num_finished + stats.num_aborted + stats.num_running
        summaries = {
            "request_queue_time_seconds": (stats.queue_s, "Arrival to first step."),
            "request_prefill_time_seconds": (stats.prefill_s, "First step to first token."),
        }
        for name, (total, help_text) in summaries.items():
            summary = SummaryMetricFamily(f"vllm:{name}", help_text, labels=["model_name"])
            summary.add_metric([self._model_name], count_value=started, sum_value=total)
            yield summary
