"""Whether two replies say the same: `same`, `different` or `unknown`. Pure; total over any replies.

Short answers compare as values or in their normal form, JSON by its canonical form, Python by its tree, tool calls by
their arguments. Of two texts that are not equal nothing is known here: programs that differ may do the same, essays
that differ may both be good. Somebody else may know (`Verdicts`): a run on shared inputs, or a judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from gateway.core.loop.replies.answers import normalise
from gateway.core.loop.replies.code import normal_form
from gateway.core.loop.replies.kinds import SHORT_WORDS_MAX, Reply, as_json, read_text, words_in
from gateway.core.loop.replies.values import same_answer

Agreement = Literal["same", "different", "unknown"]
Pair = tuple[int, int]  # indices of two replies, the smaller first
Verdicts = Mapping[Pair, Agreement]  # of pairs that were compared by more than their texts
NO_VERDICTS: Verdicts = MappingProxyType({})


def compare(a: Reply, b: Reply) -> Agreement:
    """Whether two replies say the same. An empty reply agrees with none, and a refusal with refusals alone."""
    if "empty" in (a.kind, b.kind):
        return "different"
    if "refusal" in (a.kind, b.kind):
        return "same" if a.kind == b.kind else "different"
    if a.kind == b.kind:
        return _ALIKE[a.kind](a, b)
    if "tool_call" in (a.kind, b.kind):
        return "unknown"
    if {a.kind, b.kind} == {"json", "short"}:
        first, second = (one if one.kind == "json" else as_json(one.answer) for one in (a, b))
        return _json(first, second) if first and second else "unknown"
    return "same" if _last_line_answers(a, b) or _last_line_answers(b, a) else "unknown"


def _last_line_answers(prose: Reply, short: Reply) -> bool:
    """Whether a text without a marked answer ends with the answer that the other reply gives."""
    return prose.kind == "prose" and short.kind == "short" and normalise(prose.answer) == normalise(short.answer)


def _short(a: Reply, b: Reply) -> Agreement:
    same = same_answer(a.answer, b.answer)
    return "unknown" if same is None else _known(same)


def _known(same: bool) -> Agreement:
    return "same" if same else "different"


def _prose(a: Reply, b: Reply) -> Agreement:
    return "same" if a.text.casefold().split() == b.text.casefold().split() else "unknown"


def _code(a: Reply, b: Reply) -> Agreement:
    same = [normal_form(block) for block in a.blocks] == [normal_form(block) for block in b.blocks]
    return "same" if same else "unknown"


def _calls(a: Reply, b: Reply) -> Agreement:
    return "same" if a.calls == b.calls else "unknown"


def _json(a: Reply, b: Reply) -> Agreement:
    try:
        return _values(a.value, b.value)
    except RecursionError:
        return "unknown"


def _values(a: Any, b: Any) -> Agreement:
    """The comparison of two JSON values. Texts of more than a few words that differ may still say the same."""
    if isinstance(a, dict) and isinstance(b, dict):
        return "different" if a.keys() != b.keys() else _all(_values(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return "different" if len(a) != len(b) else _all(map(_values, a, b))
    if isinstance(a, str) and isinstance(b, str):
        wordy = min(words_in(a), words_in(b)) > SHORT_WORDS_MAX
        return "same" if normalise(a) == normalise(b) else ("unknown" if wordy else "different")
    return _known(a == b and isinstance(a, bool) == isinstance(b, bool))


def _all(parts: Any) -> Agreement:
    verdicts = set(parts)
    return "different" if "different" in verdicts else ("unknown" if "unknown" in verdicts else "same")


_ALIKE: Mapping[str, Callable[[Reply, Reply], Agreement]] = {
    "short": _short,
    "prose": _prose,
    "code": _code,
    "json": _json,
    "tool_call": _calls,
}

# ---------------------------------------------------------------- of several replies


def agreement_of(a: Reply, b: Reply, pair: Pair, verdicts: Verdicts = NO_VERDICTS) -> Agreement:
    """The agreement of two replies; `pair` are their indices in `verdicts`. A verdict counts where the replies alone
    leave it unknown."""
    verdict = compare(a, b)
    return verdicts.get((min(pair), max(pair)), "unknown") if verdict == "unknown" else verdict


def groups(replies: Sequence[Reply], verdicts: Verdicts = NO_VERDICTS) -> list[list[int]]:
    """Group the indices of the replies that say the same. The largest group comes first; of equal groups, the one with
    the earliest reply. Each empty reply is a group of its own."""
    clusters: list[list[int]] = []
    for index, reply in enumerate(replies):
        pairs = ((group, (group[0], index)) for group in clusters)
        same = (of for of, pair in pairs if agreement_of(replies[of[0]], reply, pair, verdicts) == "same")
        group = next(same, None)
        if group is None:
            clusters.append([index])
        else:
            group.append(index)
    return sorted(clusters, key=lambda group: (-len(group), group[0]))


def majority(texts: Sequence[str], verdicts: Verdicts = NO_VERDICTS) -> int:
    """The index of the first reply with the most common answer; of equally common answers, the one given first. A reply
    without an answer has no vote; where none has an answer, the first that is not blank. Raises ValueError without
    replies."""
    if not texts:
        raise ValueError("no replies to vote on")
    replies = [read_text(text) for text in texts]
    clusters = groups(replies, verdicts)
    answered = (group[0] for group in clusters if replies[group[0]].kind != "empty")
    spoken = (group[0] for group in clusters if texts[group[0]].strip())
    return next(answered, next(spoken, 0))
