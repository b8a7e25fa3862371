from __future__ import annotations

from typing import Any

NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_sum",
    "e2e_request_latency_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_count",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
}


def test_metrics_have_vllm_names_and_count_what_happened(tiny_server: Any) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")
    before = [tiny_server.metric(f"vllm:{name}") for name in names]
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "n": 2, "ignore_eos": True}
    assert tiny_server.http.post("/v1/completions", json=body).status_code == 200
    after = [tiny_server.metric(f"vllm:{name}") for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [3, 18, 2]
    text = tiny_server.http.get("/metrics").text
    for name in NAMES:
        assert f"vllm:{name}{{" in text
    assert 'model_name="tiny"' in text


def test_small_routes(tiny_server: Any) -> None:
    assert set(tiny_server.http.get("/version").json()) == {"version"}
    assert set(tiny_server.http.get("/load").json()) == {"server_load"}
    assert tiny_server.http.post("/ping").status_code == 200
