"""A decoder whose prompts are computed once for all rows that share them, with or without gradient.

G plans of one prompt have all but a few tokens in common. The prompt's keys and values are kept once; each row's own
tokens look at them and at each other. Sampling and scoring are this one function, so that a sampled log-prob and the
trainer's differ by rounding alone. Shapes: P prompts, G rows a prompt, R = P·G rows, S new and T own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from policy.start.synthetic.config import ModelConfig
from policy.start.synthetic.model import Attention, Block, Pair, Qwen2, Rotary

PAD = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """Prompts, computed. `pairs` per layer [P, heads, L, head_dim]; `lengths` [P]; `states` [P, hidden]: of the last
    token of each."""

    pairs: tuple[Pair, ...]
    lengths: Tensor
    states: Tensor

    def chosen(self, prompts: Tensor) -> Prefix:
        """Only these prompts, and no padding that they do not need."""
        lengths = self.lengths[prompts]
        most = int(lengths.max())
        pairs = tuple((keys[prompts, :, :most], values[prompts, :, :most]) for keys, values in self.pairs)
        return Prefix(pairs, lengths, self.states[prompts])


@dataclass(frozen=True, slots=True)
class Own:
    """What rows have said after their prompts. `pairs` per layer [R, heads, T, head_dim]; `present` [R, T] bool."""

    pairs: tuple[Pair, ...]
    present: Tensor

    def chosen(self, rows: Tensor) -> Own:
        """Only these rows."""
        pairs = tuple((keys[rows], values[rows]) for keys, values in self.pairs)
        return Own(pairs, self.present[rows])


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [rows, longest] padded behind, and which are present [rows, longest] bool."""
    most = max(1, *(len(row) for row in rows))
    ids = torch.tensor([[*row, *[PAD] * (most - len(row))] for row in rows], device=device)
    return ids, present([len(row) for row in rows], device)


def present(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Which places rows of these lengths fill [rows, longest] bool."""
    places = torch.arange(max(1, *lengths), device=device)
    return places < torch.tensor(lengths, device=device)[:, None]


def prefix_of(model: Qwen2, prompts: Sequence[Sequence[int]]) -> Prefix:
    """Compute prompts. The last block's queries and feed-forward are computed at each prompt's last token only."""
    device = model.lm_head.weight.device
    ids, filled = padded(prompts, device)
    lengths = filled.sum(1)
    at = _rotary(model.c, torch.arange(ids.shape[1], device=device)[None])
    x, pairs = model.model.embed_tokens(ids), []
    *blocks, last = _blocks(model)
    for block in blocks:
        normed = block.input_layernorm(x)
        pairs.append(block.self_attn.keys_values(normed, at))
        x = x + block.self_attn.look(block.self_attn.queries(normed, at), pairs[-1], None)
        x = x + block.mlp(block.post_attention_layernorm(x))
    normed, ends = last.input_layernorm(x), (lengths - 1)[:, None]
    pairs.append(last.self_attn.keys_values(normed, at))
    each = torch.arange(len(ids), device=device)[:, None]
    queries = last.self_attn.queries(normed[each, ends], _rotary(model.c, ends))
    x = x[each, ends] + last.self_attn.look(queries, pairs[-1], filled[:, None, None])
    x = x + last.mlp(last.post_attention_layernorm(x))
    return Prefix(tuple(pairs), lengths, x[:, 0])


def extend(model: Qwen2, prefix: Prefix, own: Own | None, ids: Tensor, present: Tensor) -> tuple[Tensor, Own]:
    """Feed `ids` [R, S], `present` [R, S], to rows that lie prompt by prompt, G each → states [R, S, hidden] and all
    that the rows have said."""
    repeats = len(ids) // len(prefix.lengths)
    before = prefix.lengths.repeat_interleave(repeats)
    said = own.present.sum(1) if own else torch.zeros_like(before)
    positions = (before + said)[:, None] + present.long().cumsum(1) - 1
    at = _rotary(model.c, positions.clamp_min(0))
    seen = present if own is None else torch.cat([own.present, present], 1)
    masks = _masks(prefix, seen, ids.shape[1])
    x, pairs = model.model.embed_tokens(ids), []
    for layer, block in enumerate(_blocks(model)):
        normed = block.input_layernorm(x)
        keys, values = block.self_attn.keys_values(normed, at)
        if own is not None:
            keys, values = torch.cat([own.pairs[layer][0], keys], 2), torch.cat([own.pairs[layer][1], values], 2)
        pairs.append((keys, values))
        x = x + _look(block.self_attn, block.self_attn.queries(normed, at), prefix.pairs[layer], pairs[-1], masks)
        x = x + block.mlp(block.post_attention_layernorm(x))
    return x, Own(tuple(pairs), seen)


def logits(model: Qwen2, states: Tensor) -> Tensor:
    """Of states [..., hidden]."""
    return cast(Tensor, model.lm_head(model.model.norm(states)))


def _masks(prefix: Prefix, seen: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """What may not be looked at: of the prompts [P, 1, 1, L], of the own tokens [R, 1, S, T]."""
    longest = prefix.pairs[0][0].shape[2]
    shared = torch.arange(longest, device=seen.device) >= prefix.lengths[:, None]
    total = seen.shape[1]
    order = torch.arange(total, device=seen.device)
    later = order > order[total - new :, None]
    return shared[:, None, None], (later | ~seen[:, None])[:, None]


def _look(attention: Attention, queries: Tensor, shared: Pair, own: Pair, masks: tuple[Tensor, Tensor]) -> Tensor:
    """Softmax attention over the prompt's tokens and the row's own together: queries [R, heads, S, head_dim]."""
    _, heads, new, width = queries.shape
    prompts = len(shared[0])
    together = queries.view(prompts, -1, heads, new, width).transpose(1, 2).flatten(2, 3)  # [P, heads, G·S, head_dim]
    of_prompt = (together @ _spread(shared[0], heads).transpose(2, 3)).masked_fill(masks[0], -torch.inf)
    of_own = (queries @ _spread(own[0], heads).transpose(2, 3)).masked_fill(masks[1], -torch.inf)
    weights = (torch.cat([_by_row(of_prompt, new), of_own], 3) * width**-0.5).softmax(-1)
    longest = of_prompt.shape[3]
    on_prompt = weights[..., :longest].view(prompts, -1, heads, new, longest).transpose(1, 2).flatten(2, 3)
    out = _by_row(on_prompt @ _spread(shared[1], heads), new) + weights[..., longest:] @ _spread(own[1], heads)
    return cast(Tensor, attention.o_proj(out.transpose(1, 2).flatten(2)))


def _by_row(x: Tensor, new: int) -> Tensor:
    """[P, heads, G·S, n] → [R, heads, S, n]."""
    return x.unflatten(2, (-1, new)).transpose(1, 2).flatten(0, 1)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Keys or values for every query head (grouped-query attention shares them)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _blocks(model: Qwen2) -> list[Block]:
    return list(cast(nn.ModuleList, model.model.layers))


def _rotary(c: ModelConfig, positions: Tensor) -> Rotary:
    half = torch.arange(0, c.head_dim, 2, dtype=torch.float32, device=positions.device)
    angle = positions[:, None, :, None] * c.rope_theta ** (-half / c.head_dim)
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()
