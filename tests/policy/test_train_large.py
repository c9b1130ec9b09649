"""Models of transformers in training: a prompt that is computed once for all its rows changes no number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from policy.environments.base import rng_for

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from policy.train.step.optimizer import MasterAdamW  # noqa: E402
from policy.train.weights import tree  # noqa: E402
from policy.train.weights.large import LargeWeights  # noqa: E402
from policy.train.weights.lora import adapt  # noqa: E402
from policy.train.weights.prefixes import Prefixes, common  # noqa: E402
from policy.train.weights.small import Decoding, trainable  # noqa: E402

VOCAB = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16)),
}
OWNERS = [0, 0, 0, 1, 2, 2]


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    return MODELS[kind]().eval()


def weights_of(kind: str, *, apart: bool = False, **more: Any) -> LargeWeights:
    weights = LargeWeights(model_of(kind), VOCAB, 2048, **more)
    assert not weights.unshared
    if apart:
        weights.shares_prompts = False
    return weights


def ids(*key: object, count: int) -> list[int]:
    draw = rng_for(*key)
    return [draw.randrange(1, VOCAB) for _ in range(count)]


def rows() -> tuple[list[list[int]], list[list[int]]]:
    """Three prompts, two of which begin alike, and the plans of OWNERS."""
    same = ids("same", count=40)
    prompts = [[*same, *ids("a", count=9)], [*same, *ids("b", count=30)], ids("c", count=17)]
    return prompts, [ids("plan", at, count=count) for at, count in enumerate((5, 1, 12, 8, 3, 20))]


def logprobs(weights: LargeWeights) -> Any:
    prompts, plans = rows()
    spread = weights.logits(weights.states(prompts, OWNERS, plans)).log_softmax(-1)
    tokens = torch.tensor([token for plan in plans for token in plan])
    return spread.gather(1, tokens[:, None])[:, 0]


def gradients(weights: LargeWeights) -> dict[str, Any]:
    values = logprobs(weights)
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    return {name: one.grad for name, one in trainable(weights.model).items()}


@pytest.mark.parametrize("kind", MODELS)
def test_shared_prompts_change_no_log_prob_and_no_gradient(kind: str) -> None:
    shared, apart = weights_of(kind), weights_of(kind, apart=True)
    assert torch.allclose(logprobs(shared), logprobs(apart), atol=1e-4)
    ours, theirs = gradients(shared), gradients(apart)
    for name, one in ours.items():
        assert float((one - theirs[name]).norm()) <= 1e-4 * float(theirs[name].norm()) + 1e-7, name


def test_activations_computed_again_give_the_same_gradients() -> None:
    for lora in (False, True):
        one, other = weights_of("llama"), weights_of("llama", recompute=True)
        for weights in (one, other):
            if lora:
                adapt(weights.model, 4, 8.0, ("q_proj", "down_proj"), 0)
        ours, theirs = gradients(one), gradients(other)
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)
        assert not any(layer.training for layer in other._recomputed)


def fed(decoding: Decoding) -> list[Any]:
    """The scores of rows that grow by one or more tokens at a time, and of which some end."""
    found = [decoding.scores]
    decoding.feed([ids("fed", row, count=1 + row % 3) for row in range(len(OWNERS))])
    found.append(decoding.scores)
    for kept, counts in (((0, 2, 3, 4, 5), (1, 4, 1, 2, 1)), ((1, 3, 4), (300, 1, 1)), ((0, 2), (1, 1)), ((1,), (2,))):
        decoding.keep(kept)
        assert len(decoding.scores) == len(kept)
        decoding.feed([ids("more", row, count=count) for row, count in enumerate(counts)])
        found.append(decoding.scores)
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_rows_decoded_as_branches_score_as_rows_apart(kind: str) -> None:
    shared, apart = weights_of(kind), weights_of(kind, apart=True)
    prompts, _ = rows()
    with torch.inference_mode():
        expected = fed(apart.begin(prompts, OWNERS))
        for _ in range(2):  # the second time, nothing of a prompt is read but its last token
            for one, other in zip(fed(shared.begin(prompts, OWNERS)), expected, strict=True):
                assert torch.allclose(one, other, atol=1e-4)


def counted(weights: LargeWeights, prompts: Sequence[Sequence[int]]) -> int:
    """Columns that are computed to read the prompts, padding included."""
    read = 0

    def count(_: object, __: object, given: dict[str, Any]) -> None:
        nonlocal read
        read += given["input_ids"].numel()

    hook = weights.body.register_forward_pre_hook(count, with_kwargs=True)
    with torch.inference_mode():
        weights.begin(prompts, range(len(prompts)))
    hook.remove()
    return read


def test_what_prompts_begin_with_is_read_once_until_the_weights_change() -> None:
    weights = weights_of("llama")
    prompts, _ = rows()
    assert counted(weights, prompts[:2]) == 40 + 2 * 30
    assert counted(weights, prompts[:2]) == 2
    assert counted(weights, [[*prompts[0], 7, 8, 9]]) == 3  # a later round, whose prompt goes on from an earlier one
    assert counted(weights, [[*prompts[0][:40], *ids("d", count=11)]]) == 11
    optimizer = torch.optim.AdamW(weights.model.parameters(), lr=1e-3)
    logprobs(weights).sum().backward()
    optimizer.step()
    assert counted(weights, prompts[:1]) == 49


def test_prompts_read_before_are_held_within_bytes() -> None:
    pair = (torch.zeros(2, 4, 8), torch.zeros(2, 4, 8))
    held = Prefixes(bytes_max=2 * 2 * pair[0].nbytes)
    for first in (1, 2, 3):
        held.add([first, 5, 6, 7], [pair])
        held.longest([1, 5])
    assert [held.longest([first, 5, 6, 8])[0] for first in (1, 2, 3)] == [3, 0, 3]
    assert common([[1, 2, 3], [1, 2], [1, 2, 4]]) == 2


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=8)), "window"),
        (
            lambda: transformers.Qwen2ForCausalLM(
                transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
            ),
            "layers of sliding_attention",
        ),
    ],
)
def test_a_model_that_takes_no_tree_reads_a_prompt_with_each_row_and_says_why(make: Any, why: str) -> None:
    torch.manual_seed(3)
    weights = LargeWeights(make().eval(), VOCAB, 2048)
    assert why in weights.unshared
    assert not weights.shares_prompts
    prompts, plans = rows()
    with torch.inference_mode():
        begun = weights.begin(prompts, OWNERS).scores
        states = weights.states(prompts, OWNERS, plans)
    firsts = [sum(len(plan) for plan in plans[:row]) for row in range(len(plans))]
    assert torch.allclose(begun, weights.logits(states[firsts]), atol=1e-4)


def test_steps_too_small_for_bfloat16_add_up_in_float32_and_survive_a_checkpoint() -> None:
    def stepped(optimizer: MasterAdamW, weight: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (weight.float() * torch.tensor([1.0, -1.0])).sum().backward()
            optimizer.step()

    weight, plain = (
        torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=kind)) for kind in (torch.bfloat16, torch.float32)
    )
    optimizer = MasterAdamW([weight], lr=1e-4)
    stepped(optimizer, weight, 100)
    again = torch.nn.Parameter(weight.detach().clone())
    resumed = MasterAdamW([again], lr=1e-4)
    resumed.load_state_dict(optimizer.state_dict())
    stepped(resumed, again, 100)
    stepped(MasterAdamW([plain], lr=1e-4), plain, 200)
    assert again.dtype == torch.bfloat16
    assert again.tolist() == plain.to(torch.bfloat16).tolist() == [0.98046875, 2.015625]


def test_the_head_computes_in_float32_where_the_body_does_not() -> None:
    torch.manual_seed(3)
    weights = LargeWeights(MODELS["llama"]().to(torch.bfloat16).eval(), VOCAB, 2048)
    prompts, plans = rows()
    states = weights.states(prompts, OWNERS, plans)
    assert (states.dtype, weights.logits(states).dtype) == (torch.bfloat16, torch.float32)
    head = weights.model.get_output_embeddings().weight
    assert torch.allclose(weights.logits(states), states.float() @ head.float().T, atol=1e-5)
    assert all(one is not None for one in gradients(weights).values())


@pytest.mark.parametrize(("share", "off"), [(2e-4, ""), (0.02, "off behind a shared prompt")])
def test_rounding_of_a_gpu_is_no_reason_to_read_prompts_anew(
    share: float, off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = LargeWeights._tree_states
    monkeypatch.setattr(LargeWeights, "_tree_states", lambda *given: exact(*given) * (1 + share))
    why = LargeWeights(model_of("llama"), VOCAB, 2048).unshared
    assert off in why if off else not why


def test_a_model_that_ignores_the_mask_reads_prompts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = tree.visible
    monkeypatch.setattr(tree, "visible", lambda held, new: exact(torch.zeros_like(held), torch.zeros_like(new)))
    assert "off behind a shared prompt" in LargeWeights(model_of("llama"), VOCAB, 2048).unshared
