"""The Llama family as one definition, used by trainer and engine alike.

Llama 2/3, SmolLM2, Mistral, Qwen2/2.5 and Qwen3 differ only in what `ModelConfig` says: biases, q/k
norms, windows, rope. `model(tokens, positions, attention)` knows nothing of batches or caches:
tokens are packed, and `attention` says which belong together. Legend: T tokens, D hidden, N query
heads, K key/value heads, H head dim, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.core.model_config import ModelConfig
from lockstep.kernels.attention import KVFormat
from lockstep.kernels.cross_entropy import (
    TokenStatistics,
    WeightedSum,
    token_statistics,
    weighted_logprob_sum,
)
from lockstep.kernels.embedding import embedding
from lockstep.kernels.linear import PackCache, gated_linear, linear
from lockstep.kernels.linear.trained import gated_mlp, product, products
from lockstep.kernels.silu_mul import silu_mul
from lockstep.models.attention import AttentionContext, HeadSpec, PackedAttention
from lockstep.models.layers import Embedding, Linear, RMSNorm, RotaryTable, side_by_side, trained


class Attention(nn.Module):
    """Self-attention of one layer, grouped K/V heads, rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.eps = layer, config.head_dim, config.rms_norm_eps
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.window = config.window_of_layer(layer)
        d, bias = config.hidden_size, config.qkv_bias
        self.q_proj = Linear(d, config.q_size, bias=bias)
        self.k_proj = Linear(d, config.kv_size, bias=bias)
        self.v_proj = Linear(d, config.kv_size, bias=bias)
        self.o_proj = Linear(config.q_size, d, bias=config.o_bias, row_parallel=True)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.packs = PackCache()

    def forward(
        self,
        x_TD: Tensor,
        norm: RMSNorm,
        positions_T: Tensor,
        rotary: RotaryTable,
        attention: AttentionContext,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """x + attention(norm(x)), of some rows if `rows_R` says which."""
        modules = (self.q_proj, self.k_proj, self.v_proj)
        if together := trained(x_TD, *modules):
            qkv_TX, x_TD = products(x_TD, together, self.packs, norm.weight, norm.eps)
        else:
            qkv_TX = side_by_side(x_TD, modules, norm, self.packs)
        o_TX = attention.attend(self.layer, qkv_TX, positions_T, rotary, self._heads())
        if rows_R is not None:
            x_TD, o_TX = (embedding(x, rows_R, dtype=x.dtype) for x in (x_TD, o_TX))
        if output := trained(o_TX, self.o_proj):
            return product(o_TX, *output, residual_TN=x_TD)
        return self.o_proj(o_TX, residual_TN=x_TD)

    def _heads(self) -> HeadSpec:
        return HeadSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.window,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
        )


class MLP(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, f, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(d, f, bias=bias)
        self.up_proj = Linear(d, f, bias=bias)
        self.down_proj = Linear(f, d, bias=bias, row_parallel=True)
        self.packs = PackCache(interleaved=True)
        self.recompute = False
        """Compute gate and up again in the backward pass instead of keeping them."""

    def forward(self, x_TD: Tensor, norm: RMSNorm) -> Tensor:
        """x + mlp(norm(x))."""
        if all_three := trained(x_TD, self.gate_proj, self.up_proj, self.down_proj):
            return gated_mlp(x_TD, *all_three, norm.weight, norm.eps, recompute=self.recompute)
        return self.down_proj(self._gated(x_TD, norm), residual_TN=x_TD)

    def _gated(self, x_TD: Tensor, norm: RMSNorm) -> Tensor:
        gate, up = self.gate_proj, self.up_proj
        if gate.is_adapted or up.is_adapted:
            h_TD = norm(x_TD)
            return silu_mul(gate(h_TD), up(h_TD))
        return gated_linear(
            x_TD,
            gate.weight,
            up.weight,
            [module.bias for module in (gate, up) if module.bias is not None],
            packs=self.packs,
            gate_packs=gate.packs,
            up_packs=up.packs,
            scheme=gate.scheme,
            norm=norm.prologue(),
        )


class Layer(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x_TD: Tensor,
        positions_T: Tensor,
        rotary: RotaryTable,
        attention: AttentionContext,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        x_TD = self.self_attn(x_TD, self.input_layernorm, positions_T, rotary, attention, rows_R)
        return self.mlp(x_TD, self.post_attention_layernorm)


class Decoder(nn.Module):
    """Embedding, layers and final norm: what Hugging Face names `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """A causal language model. Parameters carry Hugging Face's names; uninitialised until loaded or
    `initialise`d.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        compute_dtype: torch.dtype = torch.float32,
        param_dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.activation_checkpointing = self.recomputes_mlp = False
        self.kv_format: KVFormat | None = None
        """How an engine keeps keys and values unless told otherwise, and how a trainer rounds them
        to agree with it; None: as they are computed."""
        self.rotary = RotaryTable(config.rope, config.head_dim)
        with torch.device(device):
            self.model = Decoder(config)
            self.lm_head = (
                None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
            )
        self.to(param_dtype)

    def recompute_mlp(self, value: bool) -> None:
        """Whether a training step computes gate and up of each layer again instead of keeping them:
        half the memory of activations for a tenth more time, and the same bits.
        """
        self.recomputes_mlp = value
        for layer in self.model.layers:
            layer.mlp.recompute = value

    def initialise(self, seed: int) -> None:
        """Random weights as Hugging Face draws them: normal with `initializer_range`, norms 1,
        biases 0.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=self.config.initializer_range, generator=generator)

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: AttentionContext,
        *,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (T, D) after the final norm, in the compute dtype; tokens and positions are
        int64.

        With `rows_R` only those of these tokens, (R, D): the last layer computes no more of the
        others than their keys and values.
        """
        self.rotary.reserve(attention.max_length)
        x_TD = self.model.embed_tokens(tokens_T, self.compute_dtype)
        *_, last = self.model.layers
        for layer in self.model.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x_TD = checkpoint(
                    layer, x_TD, positions_T, self.rotary, attention, use_reentrant=False
                )
            else:
                rows = rows_R if layer is last else None
                x_TD = layer(x_TD, positions_T, self.rotary, attention, rows)
        return self.model.norm(x_TD)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """fp32 logits (T, V) of hidden states."""
        head = self._head
        return linear(hidden_TD, head.weight, packs=head.packs, scheme=head.scheme, fp32_out=True)

    def token_logprobs(
        self, hidden_TD: Tensor, targets_T: Tensor, inverse_temperature: float | Tensor = 1.0
    ) -> Tensor:
        """fp32 logprob (T,) of each target under its row's distribution; differentiable; logits are
        never whole.
        """
        return self.token_statistics(hidden_TD, targets_T, inverse_temperature).logprobs_T

    def token_statistics(
        self, hidden_TD: Tensor, targets_T: Tensor, inverse_temperature: float | Tensor = 1.0
    ) -> TokenStatistics:
        """Logprobs with the entropy of each distribution beside them."""
        head = self._head
        return token_statistics(
            hidden_TD,
            head.weight,
            targets_T,
            packs=head.packs,
            scheme=head.scheme,
            inverse_temperature=inverse_temperature,
        )

    def weighted_logprob_sum(
        self,
        hidden_TD: Tensor,
        targets_T: Tensor,
        weights_T: Tensor,
        inverse_temperature: float | Tensor = 1.0,
    ) -> WeightedSum:
        """sum of weights times logprobs: the loss whose gradient costs no second pass of logits."""
        head = self._head
        return weighted_logprob_sum(
            hidden_TD,
            head.weight,
            targets_T,
            weights_T,
            packs=head.packs,
            scheme=head.scheme,
            inverse_temperature=inverse_temperature,
        )

    def pack_weights(self) -> None:
        """Pack every projection now, so that the first request does not wait for it."""
        for layer in self.model.layers:
            self.pack_layer(layer)
        self.pack_table()

    @torch.no_grad()
    def pack_layer(self, layer: nn.Module) -> None:
        """Pack one layer's projections as a step without gradients uses them: by taking one."""
        self.rotary.reserve(1)
        x_TD = torch.zeros(1, self.config.hidden_size, dtype=self.compute_dtype)
        attention = PackedAttention.from_lengths([1])
        layer(x_TD, torch.zeros(1, dtype=torch.int64), self.rotary, attention)

    @torch.no_grad()
    def pack_table(self) -> None:
        """Pack the token table and the last projection."""
        tokens_T = torch.zeros(1, dtype=torch.int64)
        self.logits(self.model.embed_tokens(tokens_T, self.compute_dtype))

    @property
    def _head(self) -> Linear | Embedding:
        return self.model.embed_tokens if self.lm_head is None else self.lm_head
