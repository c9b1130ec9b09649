"""Why a planning call is left out of an export, of training or of the gate: reasons by name, each with what to do."""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[str, str] = {
    "train_false": "their keys or requests said train: false, and that stands",
    "metadata_only": "log those keys in mode full or redacted from now on",
    "redacted": "token ids would spell out what was redacted; such requests cannot be used",
    "no_tokens": "serve the conductor with return_token_ids (the embedded one does); without tokens --method sft "
    "trains, and --format sft, dpo, jsonl, hf or --without-tokens exports",
    "no_propensity": "a router planned them, and the log does not say with which probability (an older gateway, a "
    "vote, a cascade, or in place of a conductor that failed); --method sft learns from them",
    "unlikely": "the rule drew plans that these weights would hardly make, so they say nothing of them; --method sft "
    "teaches plans that won, whoever made them",
    "drawn": "the rule drew them, and no token was sampled; our own trainer learns from them",
    "no_logprobs": "serve the conductor with --logprobs-mode processed_logprobs and collect anew",
    "other_sampling": "sampled with top_k, min_p or a penalty, or by an older gateway, which left them to the server",
    "no_allowed": "logged by an older gateway, which did not log what a plan was allowed; collect anew",
    "other_schema": "what they were allowed gives another schema than was logged; collect anew with this release",
    "other_prompt": "sampled under another prompt than these weights know, and their log-probs are of that prompt: "
    "--method sft renders them anew; for GRPO collect logs under the new prompt",
    "no_inputs": "the log lacks what the planner was shown (worker descriptions, replies, conversation), so its prompt "
    "cannot be rendered anew",
    "no_warm": "the log does not say what leaving the worker of the last turn costs, as this prompt does; collect anew",
    "no_checker_errors": "logged by an older gateway, without how often checkers err, which this prompt shows; collect "
    "anew",
    "no_plan": "no plan came of the call",
    "other_steps": "their plans check replies, give tools or choose contexts, which the student's prompt does not tell "
    "of; teach it the one that does (--prompt checked)",
    "other_form": "outside the student's grammar, in which a step has one of `expect`, `tools` and `context`, and a "
    "contract one check",
    "lost": "their outcome is not above --set outcome_above",
    "worse_plan": "their prompt has better plans, or enough of them (--set plans_max)",
    "too_long": "prompt and plan do not fit the student's context, or --set tokens_max",
    "other_tokens": "the candidate's tokenizer cuts their prompt differently, so no log-prob compares",
    "greedy": "planned at temperature 0, which explores nothing; raise BATON_EXPLORE_SHARE",
    "nucleus": "sampled with top_p < 1, whose log-probs cannot be computed again; serve with top_p 1",
    "no_outcome": "nobody judged them; post outcomes (POST /v1/outcomes)",
    "too_few_outcomes": "post outcomes (POST /v1/outcomes), or lower --min-outcomes",
    "no_verdicts": "exported by an older release, without verdicts; export anew, or leave the penalties for them at 0",
    "incomplete": "rounds or the outermost loop of the request are missing; export all of them",
    "stale_worker": "their workers have another version today or are gone; --keep-stale keeps them",
    "prompt_on_both_sides": "their question is in the training side too",
    "over_key_share": "one key may hold no more; --key-share raises it",
}


class RowRefused(ValueError):
    """A planning call that cannot be used. `reason`: a key of REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}: {REASONS[reason]}")
        self.reason = reason


def listed(counts: Mapping[str, int]) -> str:
    """One line, the most frequent reason first: `12 redacted (what to do); 3 …`; empty for no counts."""
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(f"{count} {reason} ({REASONS[reason]})" for reason, count in most)
