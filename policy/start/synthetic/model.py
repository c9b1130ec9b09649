"""The conductor's weights as a Qwen2 decoder in plain torch. Parameter names are Hugging Face's, so the state is the
checkpoint: `Qwen2ForCausalLM`, vLLM and policy.serve read what `state_dict()` holds."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from policy.start.synthetic.config import ModelConfig

Pair = tuple[Tensor, Tensor]  # keys and values [rows, heads_kv, tokens, head_dim]
Rotary = tuple[Tensor, Tensor]  # cosines and sines [rows or 1, 1, tokens, head_dim]
Cache = list[Pair]  # per layer


class Attention(nn.Module):  # type: ignore[misc]
    """Causal self-attention with rotary positions; projections of queries, keys and values carry a bias, as Qwen2's."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim)
        self.k_proj = nn.Linear(c.hidden, c.heads_kv * c.head_dim)
        self.v_proj = nn.Linear(c.hidden, c.heads_kv * c.head_dim)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)

    def queries(self, x: Tensor, at: Rotary) -> Tensor:
        """[rows, tokens, hidden] → [rows, heads, tokens, head_dim], turned to their positions."""
        return _rotated(self._split(self.q_proj(x)), at)

    def keys_values(self, x: Tensor, at: Rotary) -> Pair:
        """What later positions look at."""
        return _rotated(self._split(self.k_proj(x)), at), self._split(self.v_proj(x))

    def look(self, queries: Tensor, pair: Pair, mask: Tensor | None) -> Tensor:
        """[rows, queries, hidden]. Without `mask`, causal."""
        gqa = self.c.heads != self.c.heads_kv
        out = functional.scaled_dot_product_attention(
            queries, *pair, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa
        )
        return cast(Tensor, self.o_proj(out.transpose(1, 2).flatten(2)))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2)


def _rotated(x: Tensor, at: Rotary) -> Tensor:
    """arXiv:2104.09864 in the half-split layout of Hugging Face's models."""
    first, second = x.chunk(2, -1)
    return x * at[0] + torch.cat((-second, first), -1) * at[1]


class Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.inner, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.inner, bias=False)
        self.down_proj = nn.Linear(c.inner, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.mlp = Mlp(c)


def _run(block: Block, x: Tensor, at: Rotary, past: Pair | None, mask: Tensor | None) -> tuple[Tensor, Pair]:
    normed = block.input_layernorm(x)
    pair = block.self_attn.keys_values(normed, at)
    if past is not None:
        pair = torch.cat([past[0], pair[0]], 2), torch.cat([past[1], pair[1]], 2)
    x = x + block.self_attn.look(block.self_attn.queries(normed, at), pair, mask)
    return x + block.mlp(block.post_attention_layernorm(x)), pair


class Body(nn.Module):  # type: ignore[misc]
    def __init__(self, c: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, c.hidden)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.hidden, eps=c.norm_eps)


class Qwen2(nn.Module):  # type: ignore[misc]
    """The decoder, embeddings untied."""

    def __init__(self, c: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.c = c
        self.model = Body(c, vocab)
        self.lm_head = nn.Linear(c.hidden, vocab, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                scale = 0.5 if "embed" in name else 1.0
                nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [rows, tokens], padded behind, and positions [rows, n] → logits [rows, n, vocab] at those positions, and
        the states [rows, tokens, hidden] half way up.

        The last block's queries and feed-forward are computed at `wanted` only: a fifth of all work at four layers."""
        at = self._rotary(torch.arange(ids.shape[1])[None])
        x = self.model.embed_tokens(ids)
        *blocks, last = self.model.layers
        middle = x
        for index, block in enumerate(blocks):
            x, _ = _run(cast(Block, block), x, at, None, None)
            middle = x if index < len(self.model.layers) // 2 else middle
        normed = last.input_layernorm(x)
        pair = last.self_attn.keys_values(normed, at)
        rows = torch.arange(len(ids))[:, None]
        queries = last.self_attn.queries(normed[rows, wanted], self._rotary(wanted))
        mask = torch.arange(ids.shape[1]) <= wanted[:, None, :, None]
        x = x[rows, wanted] + last.self_attn.look(queries, pair, mask)
        x = x + last.mlp(last.post_attention_layernorm(x))
        return self.lm_head(self.model.norm(x)), middle

    def read_off(self, states: Tensor) -> Tensor:
        """Logits straight off states half way up: only training asks for them."""
        return cast(Tensor, self.lm_head(self.model.norm(states)))

    def extend(self, ids: Tensor, past: Cache | None, positions: Tensor, mask: Tensor) -> tuple[Tensor, Cache]:
        """Ids after `past` → logits of the last one [rows, vocab], and the longer cache."""
        at = self._rotary(positions)
        x, cache = self.model.embed_tokens(ids), []
        for index, block in enumerate(self.model.layers):
            x, pair = _run(cast(Block, block), x, at, past[index] if past else None, mask)
            cache.append(pair)
        return self.lm_head(self.model.norm(x[:, -1])), cache

    def _rotary(self, positions: Tensor) -> Rotary:
        half = torch.arange(0, self.c.head_dim, 2, dtype=torch.float32)
        angle = positions[:, None, :, None] * self.c.rope_theta ** (-half / self.c.head_dim)
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()

    def sample(
        self, prompts: list[list[int]], tokens_max: int, end: int, temperature: float, generator: torch.Generator
    ) -> list[list[int]]:
        """Free decoding (no grammar) of all prompts at once; temperature 0 takes the likeliest token."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[end] * (longest - len(p)) + p for p in prompts])
        real = torch.tensor([[False] * (longest - len(p)) + [True] * len(p) for p in prompts])
        positions = (real.long().cumsum(1) - 1).clamp(min=0)
        causal = torch.ones(longest, longest, dtype=torch.bool).tril()
        mask = (causal[None] & real[:, None]) | torch.eye(longest, dtype=torch.bool)[None]
        scores, cache = self.extend(ids, None, positions, mask[:, None])
        out: list[list[int]] = [[] for _ in prompts]
        done = torch.zeros(len(prompts), dtype=torch.bool)
        position = positions[:, -1:]
        for _ in range(tokens_max):
            token = scores.argmax(-1)
            if temperature > 0:
                token = torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator)[:, 0]
            done |= token == end
            for row in torch.nonzero(~done)[:, 0].tolist():
                out[row].append(int(token[row]))
            if bool(done.all()):
                break
            real = torch.cat([real, torch.ones_like(real[:, :1])], 1)
            position = position + 1
            scores, cache = self.extend(token[:, None], cache, position, real[:, None, None])
        return out
