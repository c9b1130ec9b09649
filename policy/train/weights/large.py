"""Any causal language model that transformers loads, behind the interface of `Weights`. The one file that imports it.

A prompt is computed once for all its rows (`tree`), in decoding and in scoring. A model that does not look at all
earlier tokens reads it once a row (`unshared`), and says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gateway.errors import ConfigError
from policy.train.weights import tree, unshared
from policy.train.weights.prefixes import Prefixes, common
from policy.train.weights.small import Decoding, Ids, changes
from policy.train.weights.tree import TRUNK, Columns, Layout, Stretch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHECK_PROMPT, CHECK_PLANS = (1, 2, 3, 4, 5), ((6, 7, 8), (9, 10))
# largest difference of a logit between the two ways, as a share of the largest logit: a GPU's kernels round otherwise
# for another shape (SmolLM2 in float32 on an H200: 1.2e-3 of 33)
CHECK_MAX = {torch.float32: 1e-3, torch.bfloat16: 0.05}
MESSAGE_CHARS_MAX = 200
COMMON_MIN = 32  # tokens that several prompts begin with, from which on they are read for all at once


class LargeWeights:
    """As `Weights` says. `recompute`: the layers compute their activations again in the backward pass. `unshared`: why
    prompts are read once a row; empty where they are shared."""

    def __init__(self, model: nn.Module, vocab: int, context: int, *, recompute: bool = False) -> None:
        self.model = model
        self.vocab = vocab
        self.context = context
        self.device = next(model.parameters()).device
        self.unshared = self._why_unshared()
        self.shares_prompts = not self.unshared
        self._recomputed = _recomputed_layers(model) if recompute else []
        self._prefixes = Prefixes()

    @classmethod
    def load(cls, directory: Path, context: int, dtype: str, device: str, *, recompute: bool = False) -> LargeWeights:
        """From a Hugging Face directory. Raises ConfigError where transformers or the model is missing."""
        try:
            from transformers import AutoModelForCausalLM
        except ModuleNotFoundError:
            raise ConfigError(
                "this model needs transformers: install the extra with `pip install '.[train,embedded]'`"
            ) from None
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype], local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--init {directory}: {str(error).splitlines()[0]}") from None
        model = model.to(device).eval()  # no dropout: sampled and scored log-probs must be equal
        return cls(model, int(model.get_output_embeddings().weight.shape[0]), context, recompute=recompute)

    def states(self, prompts: Sequence[Ids], owners: Sequence[int], plans: Sequence[Ids]) -> Tensor:
        """As the interface says."""
        with _training(self._recomputed):
            if not self.shares_prompts:
                return unshared.states(self.body, self.device, prompts, owners, plans)
            return self._tree_states(prompts, owners, plans)

    def logits(self, states: Tensor) -> Tensor:
        """As the interface says; the head computes in float32, whatever the body does."""
        head = self.model.get_output_embeddings()
        if states.dtype == torch.float32:
            logits: Tensor = head(states)
            return logits
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(states.float(), head.weight.float(), bias)

    def begin(self, prompts: Sequence[Ids], owners: Sequence[int]) -> Decoding:
        """As the interface says."""
        if not self.shares_prompts:
            return unshared.PlainRows(self.body, self.logits, self.device, prompts, owners)
        return _Trees(self, self._read(prompts), prompts, owners)

    @property
    def body(self) -> Any:
        """The model without its head."""
        return self.model.base_model

    def extend(self, columns: Columns, layout: Layout) -> Tensor:
        """Feed trees; the states of the new columns [P, S, hidden]."""
        out = self.body(
            input_ids=layout.ids,
            attention_mask=tree.visible(columns.branch, layout.branch),
            position_ids=layout.positions,
            past_key_values=columns,
            use_cache=True,
        )
        columns.add(layout.branch)
        states: Tensor = out.last_hidden_state
        return states

    def _tree_states(self, prompts: Sequence[Ids], owners: Sequence[int], plans: Sequence[Ids]) -> Tensor:
        trees = [[Stretch(prompt, 0, TRUNK)] for prompt in prompts]
        nth = []
        for owner, plan in zip(owners, plans, strict=True):
            nth.append(len(trees[owner]))
            trees[owner].append(Stretch(plan[:-1], len(prompts[owner]), nth[-1]))
        layout = tree.laid_out(trees, self.device)
        nothing = layout.branch[:, :0]
        out = self.body(
            input_ids=layout.ids,
            attention_mask=tree.visible(nothing, layout.branch),
            position_ids=layout.positions,
            use_cache=False,
        )
        width, places = layout.ids.shape[1], list[int]()
        for owner, number in zip(owners, nth, strict=True):
            ends = layout.ends[owner]
            places += [owner * width + at for at in (ends[0] - 1, *range(ends[number - 1], ends[number]))]
        states: Tensor = out.last_hidden_state.flatten(0, 1)
        return states.index_select(0, torch.tensor(places, device=self.device))

    def _read(self, prompts: Sequence[Ids]) -> tuple[Columns, Tensor]:
        """The prompts as trunks, and the state of each one's last token [P, hidden]. What they begin with is read once,
        or not at all where these weights have read it before."""
        known = self._prefixes.at(changes(self.model))
        shared = min(common(prompts), *(len(prompt) - 1 for prompt in prompts))
        if len(prompts) > 1 and shared >= COMMON_MIN and known.longest(prompts[0][:shared])[0] < shared:
            columns = Columns(1, self.device)
            self.extend(columns, tree.laid_out([[Stretch(prompts[0][:shared], 0, TRUNK)]], self.device))
            known.add(prompts[0][:shared], columns.read(0))
        found = [known.longest(prompt[:-1]) for prompt in prompts]
        columns = Columns(len(prompts), self.device)
        columns.write(found)
        rest = [[Stretch(prompt[length:], length, TRUNK)] for prompt, (length, _) in zip(prompts, found, strict=True)]
        layout = tree.laid_out(rest, self.device)
        states = self.extend(columns, layout)
        for at, prompt in enumerate(prompts):
            known.add(prompt, columns.read(at))
        each = torch.arange(len(prompts), device=self.device)
        return columns, states[each, torch.tensor([ends[0] - 1 for ends in layout.ends], device=self.device)]

    def _why_unshared(self) -> str:
        config = self.model.config.get_text_config()
        kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
        if kinds:
            return f"it has layers of {', '.join(sorted(kinds))}"
        if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
            return "it looks at a window of the tokens"
        try:
            with torch.no_grad():
                given = [CHECK_PROMPT], [0, 0], CHECK_PLANS
                apart = self.logits(unshared.states(self.body, self.device, *given))
                off = float((self.logits(self._tree_states(*given)) - apart).abs().max() / apart.abs().max())
        except Exception as error:  # boundary: a model that takes no such mask raises anything
            return f"it takes no mask of four dimensions ({repr(error)[:MESSAGE_CHARS_MAX]})"
        return (
            ""
            if off <= CHECK_MAX[next(self.model.parameters()).dtype]
            else f"its logits are {off:.1%} off behind a shared prompt"
        )


class _Trees:
    """Rows that are decoded side by side, as branches of their prompts' trees."""

    def __init__(
        self, weights: LargeWeights, read: tuple[Columns, Tensor], prompts: Sequence[Ids], owners: Sequence[int]
    ) -> None:
        self._weights = weights
        self._columns, states = read
        self._trees = list(owners)
        self._branches = list(range(1, len(owners) + 1))
        self._lengths = [len(prompts[owner]) for owner in owners]
        self.scores = weights.logits(states[torch.tensor(owners, device=weights.device)])

    def feed(self, tokens: Sequence[Ids]) -> None:
        """As the interface says."""
        each = list(zip(self._trees, tokens, self._lengths, self._branches, strict=True))
        trees = [
            [Stretch(ids, start, branch) for _, ids, start, branch in own]
            for _, own in groupby(each, lambda row: row[0])
        ]
        layout = tree.laid_out(trees, self._weights.device)
        states = self._weights.extend(self._columns, layout)
        ends = [(at, end - 1) for at, own in enumerate(layout.ends) for end in own]
        at, end = torch.tensor(ends, device=self._weights.device).T
        self.scores = self._weights.logits(states[at, end])
        self._lengths = [length + len(ids) for length, ids in zip(self._lengths, tokens, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """As the interface says."""
        trees = sorted({self._trees[row] for row in rows})
        number = {old: new for new, old in enumerate(trees)}
        self._branches = [self._branches[row] for row in rows]
        self._columns.keep(trees, self._branches)
        self._trees = [number[self._trees[row]] for row in rows]
        self._lengths = [self._lengths[row] for row in rows]
        self.scores = self.scores[torch.tensor(rows, device=self._weights.device)]


def _recomputed_layers(model: Any) -> list[Any]:
    """The layers that can forget their activations, made to do so while they are in training mode. Raises ConfigError
    for a model that has none."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(f"--set recompute=false: {type(model).__name__} cannot compute its activations again")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False) is True]


@contextmanager
def _training(layers: Sequence[Any]) -> Iterator[None]:
    """These layers alone in training mode, not what is in them: no dropout."""
    for layer in layers:
        layer.training = torch.is_grad_enabled()
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
