"""From the command line's options to a running engine: the slow part, run in a thread."""

from __future__ import annotations

from pathlib import Path

from lockstep import kernels
from lockstep.core.errors import ConfigError
from lockstep.engine.async_engine import AsyncEngine
from lockstep.engine.config import EngineConfig
from lockstep.models import LoadedModel, load_model
from lockstep.models.export import load_adapter_weights, read_adapter_config
from lockstep.models.lora import apply_lora
from lockstep.serve.config import EngineOptions
from lockstep.serve.defaults import GenerationDefaults
from lockstep.serve.service import ServedModel


def load_served_model(source: str, options: EngineOptions) -> ServedModel:
    """Load, adapt, and start the engine. Raises LockstepError in one sentence."""
    if options.threads is not None:
        kernels.set_num_threads(options.threads)
    loaded = load_model(
        source,
        precision=options.precision,
        weights=options.quantization,
        packed=options.adapter is None,
    )
    if options.adapter is not None:
        add_adapter(loaded, Path(options.adapter))
    config = _engine_config(options, loaded)
    loaded.model.pack_weights()
    engine = AsyncEngine(loaded.model, loaded.tokenizer, config)
    use_model_defaults = options.generation_config == "model"
    return ServedModel(
        engine=engine,
        tokenizer=loaded.tokenizer,
        defaults=GenerationDefaults.from_generation_config(
            loaded.generation_config if use_model_defaults else {}
        ),
        max_model_len=config.model_len(loaded.config),
        vocab_size=loaded.config.vocab_size,
        root=str(loaded.folder),
        precision=options.precision,
    )


def add_adapter(loaded: LoadedModel, folder: Path) -> None:
    """Put a PEFT adapter on the model, unmerged: its answers keep the trainer's bits."""
    config, _ = read_adapter_config(folder)
    apply_lora(loaded.model, config)
    load_adapter_weights(loaded.model, folder)


def _engine_config(options: EngineOptions, loaded: LoadedModel) -> EngineConfig:
    config = EngineConfig(
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_cache_tokens=options.kv_cache_tokens,
    )
    max_model_len = config.model_len(loaded.config)
    if options.kv_cache_tokens is not None and options.kv_cache_tokens < max_model_len:
        raise ConfigError(
            f"--kv-cache-tokens is {options.kv_cache_tokens}, but one request may take "
            f"{max_model_len}; raise it, or lower --max-model-len"
        )
    return config
