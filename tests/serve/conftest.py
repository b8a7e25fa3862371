"""A tiny random model with a real tokenizer and template, for tests that need a whole server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from lockstep.core.files import write_json, write_text
from lockstep.serve.config import EngineOptions, HttpConfig
from lockstep.serve.listener import bind
from lockstep.serve.loading import load_served_model
from lockstep.serve.server import Server

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 32, 2, 4, 2, 8, 64
MAX_POSITION = 256
DEFAULTS = {"precision": "fp32", "threads": 1, "kv_cache_tokens": 16_384}

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: 2 layers, every byte a token, a few merges, ChatML, random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    vocab_size = write_tokenizer(folder)
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": HIDDEN,
            "intermediate_size": FEED_FORWARD,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": MAX_POSITION,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": vocab_size - 3,
            "eos_token_id": vocab_size - 1,
            "torch_dtype": "float32",
        },
    )
    write_json(folder / "generation_config.json", {"eos_token_id": vocab_size - 1})
    save_file(random_weights(vocab_size), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> int:
    """Byte-level BPE; returns the vocabulary's size."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("a", "n"), ("Ġ", "a"), ("l", "l")]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    library = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    library.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
    )
    write_text(folder / "chat_template.jinja", CHATML)
    return library.get_vocab_size()


def random_weights(vocab_size: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)

    def matrix(rows: int, columns: int, scale: float = 0.2) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * scale).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN, 0.5),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": matrix(FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, FEED_FORWARD),
        }
    return weights


class RunningServer:
    """A server in a thread of this process, and clients for it (making one costs 0.1 s)."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url
        self.port = int(self.url.rpartition(":")[2])
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def metric(self, name: str, **labels: str) -> float:
        """One value of /metrics; 0 if there is none yet."""
        text = self.http.get("/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return 0.0


@pytest.fixture(scope="session")
def start_server(tiny_model: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts servers of the tiny model on free ports; all stop at the end of the session."""
    running: list[tuple[Server, threading.Thread]] = []

    def start(*, http: HttpConfig | None = None, **options: Any) -> RunningServer:
        api_key = options.pop("api_key", None)
        settings = EngineOptions(**(DEFAULTS | options))
        ready = threading.Event()
        server = Server(
            http or HttpConfig(),
            bind("127.0.0.1", 0),
            lambda: load_served_model(str(tiny_model), settings),
            names=("tiny", "also-tiny"),
            api_key=api_key,
            on_ready=lambda url: ready.set(),
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        assert ready.wait(60)
        return RunningServer(server)

    yield start
    for server, _ in running:
        server.stop()
    for _, thread in running:
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def tiny_server(start_server: Callable[..., RunningServer]) -> RunningServer:
    """The server most tests share."""
    return start_server()


@pytest.fixture(scope="session")
def client(tiny_server: RunningServer) -> OpenAI:
    return tiny_server.client


@pytest.fixture(scope="session")
def http(tiny_server: RunningServer) -> httpx.Client:
    return tiny_server.http
