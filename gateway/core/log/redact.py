"""What may not reach the log: secrets never do, personal data and text according to the key's log mode. Pure.

    full      everything but secrets
    redacted  and no e-mail address, phone number, payment card or IBAN
    metadata  no text at all: tokens, costs, timings, workers and the shape of the plan stay

Token ids spell out the text they encode, so a rollout in which anything was taken out keeps none. Every pattern is
bounded and is tried only where its needle (a plain substring) occurs, so that long texts stay cheap.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

import msgspec

from gateway.core.openai.body import NESTING_MAX, check_nesting

SECRET = "[secret]"  # noqa: S105 - the mark that stands for one
DEPTH_MAX = 64
SECRET_CHARS_MIN = 8
KNOWN_MAX = 4_096
SEARCHED_MAX = 256  # of known secrets, each of which is looked for in a record by itself
NAMES_MAX, NAME_CHARS_MAX = 4_096, 64
_L, _R = r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])"
_QUERY = r"(?:api[_-]?key|key|token|access_token|auth|secret|password|sig|signature)"
_PEM = r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----"

# (needles, pattern, replacement): the pattern runs when the text holds one of the needles.
_SECRETS: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = tuple(
    (needles, re.compile(pattern), replacement)
    for needles, pattern, replacement in (
        (("sk-", "sk_"), _L + r"sk[-_](?=[\w-]{0,80}?\d)[\w-]{16,400}", SECRET),
        (("AIza",), _L + r"AIza[\w-]{30,80}", SECRET),
        (("bt_",), _L + r"bt_(?:data|admin)_[0-9A-Za-z]{8,64}(?:_[0-9A-Za-z]{8,128})?", SECRET),
        (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), _L + r"gh[pousr]_[A-Za-z0-9]{20,255}", SECRET),
        (("github_pat_",), _L + r"github_pat_\w{20,255}", SECRET),
        (("glpat-", "xai-", "pplx-"), _L + r"(?:glpat|xai|pplx)-[\w-]{16,255}", SECRET),
        (("hf_", "gsk_", "r8_"), _L + r"(?:hf|gsk|r8)_[A-Za-z0-9]{24,255}", SECRET),
        (("AKIA", "ASIA"), _L + r"(?:AKIA|ASIA)[0-9A-Z]{16}" + _R, SECRET),
        (("xox",), _L + r"xox[abeoprs]-[A-Za-z0-9-]{10,255}", SECRET),
        (("eyJ",), _L + r"eyJ[\w-]{8,8192}\.[\w-]{8,8192}\.[\w-]{8,8192}", SECRET),
        (("earer ", "EARER "), r"(?i)\b(bearer[ \t]{1,8})[\w.~+/=-]{16,8192}", rf"\1{SECRET}"),
        (("://",), r"://[^\s/@:]{0,256}:[^\s/@]{1,256}@", f"://{SECRET}@"),
        (("=",), rf"(?i)([?&]{_QUERY}=)[^&\s#\"'<>]{{6,2048}}", rf"\1{SECRET}"),
        (
            ("PRIVATE KEY-----",),
            rf"{_PEM}(?:(?:(?!-----)[\s\S]){{0,20000}}-----END [A-Z ]{{0,40}}PRIVATE KEY-----"
            r"|[\sA-Za-z0-9+/=\\]{0,20000})",
            SECRET,
        ),
    )
)
_ANY_NEEDLE = "|".join(re.escape(needle) for needles, _, _ in _SECRETS for needle in needles)
_MARKS = "-_:=. "
_ALSO = {"xox": "-", "eyJ": "."}  # what a pattern needs beside its needle
_NEEDLES = tuple(  # each with a sign that is seldom in long texts, and that it cannot be without
    (needle, _ALSO.get(needle) or next((sign for sign in needle if sign in _MARKS), ""))
    for needles, _, _ in _SECRETS
    for needle in needles
)
# Of a record as JSON: the needles, each with its capital, where it has one, as a single sign is found at once. Names of
# the log hold `sk_`, and many texts hold `=` and `://`; these need more of their patterns. An escape such as `\\n` may
# stand before a text.
_IN_JSON = tuple(
    (next((sign for sign in needle if sign.isupper()), ""), needle)
    for needles, _, _ in _SECRETS
    for needle in needles
    if needle not in ("sk-", "sk_", "=", "://")
)
_SK = re.compile(r"sk[-_](?:(?<![A-Za-z0-9]sk.)|(?<=\\[bfnrt]sk.)|(?<=\\u[0-9a-f]{4}sk.))")
_URL_PARTS = (("=", re.compile(rf"(?i)[?&]{_QUERY}=")), ("://", re.compile(r'://(?:[^/@"\\]|\\.)*@')))
DATA_HEAD_CHARS = 200  # of a `data:` URL
_DATA_HEAD = re.compile(r"data:[\w.+-]+/[\w.+-]+(;[\w-]+=[\w.+-]*)*;base64")
_BASE64 = (string.ascii_letters + string.digits + "+/=").encode()
LONG_CHARS = 16_384  # from here on substrings are found faster one by one than all at once
_SECRET_NAMES = re.compile(r"(?i)(?:proxy-)?authorization|(?:x-)?api[-_]?key|password|passwd|client_secret|private_key")
# The ends of these as JSON in lower case, and what `(?i)` takes for i, k and s beside their own capitals.
_ENDS_OF_NAMES = ('authorization":', 'key":', 'password":', 'passwd":', 'client_secret":')
_LOOKALIKES = re.compile("[\u0130\u0131\u017f\u212a]")
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])")
_DIGITS = re.compile(r"(?<![\w.+-])(?:\d[ -]?){12,18}\d(?![\w-])")
_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])")
_PHONE = re.compile(
    r"(?<![\w.+(-])(?:"
    r"\+\d{1,3}(?:[ ./-]?\(?\d{1,5}\)?){2,6}"  # +49 170 1234567
    r"|\(\d{2,5}\)[ -]?\d{3,4}[ -]?\d{3,5}"  # (555) 123-4567
    r"|\d{3}[-. ]\d{3}[-. ]\d{4}"  # 555-123-4567
    r"|(?<!\d )0[1-9]\d{0,3}[ /-]\d{3,8}(?:[ -]\d{2,5}){0,2}"  # 030 1234567
    r")(?![\w-])"
)
ROLLOUT_TEXT = ("request", "reply", "error", "tags", "end_user")
ROUND_TEXT = ("messages", "plan_text", "plan", "shown", "refusal")
STEP_TEXT = ("task", "messages", "reply", "tool_calls", "error", "attempts")  # a verdict may quote a reply
NAMES_OF_THE_CLIENT = ("end_user", "task_type")  # kept in every mode, so they may not be an address
TOKEN_FIELDS = ("prompt_token_ids", "plan_token_ids", "plan_logprobs", "decision_mask")
NOBODYS_TEXT = (
    *TOKEN_FIELDS,
    "pool",
    "caps",
    "allowed",
    "memory",
    "decision",
    "failures",
)  # numbers, and the names of workers
# All fields but numbers, hashes, times, Baton's own ids and words, and NOBODYS_TEXT: nothing else can hold a secret.
FROM_OUTSIDE = (
    *("org", "policy_requested", "pool_name", "request", "end_user", "task_type", "task_embedder", "policy_used"),
    *("policy_version", "policy_assigned", "fallback", "turn", "capped", "error", "reply", "tags", "answered_by"),
    *("marks", "facts"),
)
ROUND_FROM_OUTSIDE = (
    *("planner", "policy_version", "prompt_version", "messages", "plan_text", "plan", "flags", "sampling", "shown"),
    "refusal",
)
STEP_FROM_OUTSIDE = (
    *("worker", "handle", "worker_version", "task", "messages", "reply", "tool_calls", "finish_reason", "error"),
    *("lowered", "usage_details", "attempts"),
)
_of_rollout, _of_round, _of_step = (
    itemgetter(*names) for names in (FROM_OUTSIDE, ROUND_FROM_OUTSIDE, STEP_FROM_OUTSIDE)
)
_encode = msgspec.json.Encoder().encode
_NUMBERS = frozenset((int, float, bool, type(None)))
_MAPPINGS = (dict, Mapping)
_NESTED = (dict, list, tuple, Mapping)
_NO_TEXT_ROUND: dict[str, Any] = {"messages": [], "plan_text": None, "shown": None}
_NO_TEXT_STEP: dict[str, Any] = {"task": None, "messages": [], "reply": None, "tool_calls": None}


class Redactor:
    """`secrets`: values to remove wherever they occur, such as the pool's provider keys (8 characters or more)."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._values: tuple[str, ...] = ()
        self.learn(secrets)

    def learn(self, secrets: Iterable[str]) -> None:
        """Remove these values as well, from now on. What was known stays known, the newest `KNOWN_MAX` of it: a key
        that was replaced may still come back in a late reply."""
        values = [value for value in secrets if len(value) >= SECRET_CHARS_MIN]
        self._values = tuple(dict.fromkeys([*values, *self._values]))[:KNOWN_MAX]
        self._names: tuple[dict[Any, tuple[Any, bool]], ...] = ({}, {})  # by `personal`
        by_length = sorted(self._values, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, by_length))) if by_length else None
        # one look decides for nearly every text that there is nothing to do
        self._suspect = re.compile("|".join([*map(re.escape, by_length), _ANY_NEEDLE]))
        self._known_in_json = [_encode(value.encode("utf-8", "replace").decode())[1:-1].decode() for value in by_length]

    def scrub(self, value: Any) -> Any:
        """A copy of JSON-able data without secrets, keys of mappings included; nothing nests deeper than 64."""
        return self._walk(value, False, 0)

    def scrub_text(self, text: str, *, personal: bool = False) -> str:
        """`text` without secrets, and where `personal` without personal data either. Data in base64 holds neither."""
        if len(text) >= LONG_CHARS and is_data(text):
            return text
        if self._may_hold_secrets(text):
            text = self._without_secrets(text)
        return _without_personal(text) if personal else text

    def _may_hold_secrets(self, text: str) -> bool:
        if len(text) < LONG_CHARS:
            return self._suspect.search(text) is not None
        here = {sign for sign in _MARKS if sign in text}
        return any(needle in text for needle, sign in _NEEDLES if not sign or sign in here) or (
            self._known is not None and self._known.search(text) is not None
        )

    def _without_secrets(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(SECRET, text)
        for needles, pattern, replacement in _SECRETS:
            if any(needle in text for needle in needles):
                text = pattern.sub(replacement, text)
        return text

    def apply_mode(self, payload: Mapping[str, Any], mode: str) -> dict[str, Any]:
        """A rollout's payload as `mode` lets it be logged. An unknown mode counts as `metadata`."""
        if mode not in ("full", "redacted"):
            return self._part(_without_text(payload), NAMES_OF_THE_CLIENT, True)
        if mode == "full" and len(self._values) <= SEARCHED_MAX and self._is_clean(payload):
            return dict(payload)
        personal = mode == "redacted"
        rounds = [self._part(one, ROUND_TEXT, personal) for one in payload["rounds"]]
        steps = [self._part(one, STEP_TEXT, personal) for one in payload["steps"]]
        rest = {name: value for name, value in payload.items() if name not in ("rounds", "steps")}
        text = self._part(rest, ROLLOUT_TEXT, personal)
        parts = ((payload["rounds"], rounds, ROUND_TEXT), (payload["steps"], steps, STEP_TEXT))
        changed = any(text[name] != rest[name] for name in ROLLOUT_TEXT if name in rest) or any(
            new[name] != old[name]
            for before, after, names in parts
            for old, new in zip(before, after, strict=True)
            for name in names
            if name in old
        )
        if changed:
            rounds = [one | {name: [] for name in TOKEN_FIELDS} for one in rounds]
        return text | {"rounds": rounds, "steps": steps}

    def _is_clean(self, payload: Mapping[str, Any]) -> bool:
        """Whether `full` certainly leaves a payload as it is. Nearly all are so, and to search the JSON of what came
        from outside takes a fraction of the time of a walk through them."""
        try:
            parts = _of_rollout(payload), *map(_of_round, payload["rounds"]), *map(_of_step, payload["steps"])
            text = _without_data(_encode(parts).decode())
            if _may_be_deep(text) and any(_may_be_deep(_encode(part).decode()) for part in parts):
                check_nesting(payload)
        except (KeyError, TypeError, ValueError, RecursionError):  # half a surrogate pair, a number beyond 64 bits
            return False
        for sign, needle in _IN_JSON:
            if sign in text and needle in text:
                return False
        for known in self._known_in_json:
            if known in text:
                return False
        if _SK.search(text) or any(sign in text and part.search(text) for sign, part in _URL_PARTS):
            return False
        if not text.isascii() and _LOOKALIKES.search(text):
            return False
        lower = text.lower()
        return not any(end in lower for end in _ENDS_OF_NAMES)

    def _part(self, record: Mapping[str, Any], text_fields: tuple[str, ...], personal: bool) -> dict[str, Any]:
        return {
            name: value if name in NOBODYS_TEXT else self._walk(value, personal and name in text_fields, 1)
            for name, value in record.items()
        }

    def _walk(self, value: Any, personal: bool, depth: int) -> Any:
        if type(value) in _NUMBERS:  # the most frequent first: this runs over all that is logged
            return value
        if isinstance(value, str):
            return self.scrub_text(value, personal=personal)
        if not isinstance(value, _NESTED):
            return value
        if depth > DEPTH_MAX:
            return "[too deep]"
        if not isinstance(value, _MAPPINGS):
            return [self._walk(item, personal, depth + 1) for item in value]
        names, copy = self._names[personal], {}
        for key, item in value.items():
            name, is_secret = names.get(key) or self._name(key, personal)
            copy[name] = SECRET if is_secret and isinstance(item, str) else self._walk(item, personal, depth + 1)
        return copy

    def _name(self, key: Any, personal: bool) -> tuple[Any, bool]:
        """The name of a property without secrets, and whether its text is a secret. The log has few names, so they are
        remembered."""
        name = self._walk(key, personal, 0), _SECRET_NAMES.fullmatch(str(key)) is not None
        if type(key) is str and len(key) <= NAME_CHARS_MAX:  # not 1, which equals True
            names = self._names[personal]
            if len(names) >= NAMES_MAX:
                names.clear()
            names[key] = name
        return name


def is_data(text: str) -> bool:
    """Whether a text is base64 without a break, or a `data:` URL of it: an image, sound or file."""
    head, comma, _ = text[:DATA_HEAD_CHARS].partition(",")
    encoded = text[len(head) + 1 :] if comma and _DATA_HEAD.fullmatch(head) else text
    return encoded.isascii() and not encoded.encode().translate(None, _BASE64)


def _without_data(text: str) -> str:
    """A JSON text without its long strings of base64."""
    if len(text) < LONG_CHARS:
        return text
    return '"'.join(piece for piece in text.split('"') if len(piece) < LONG_CHARS or not is_data(piece))


def _may_be_deep(text: str) -> bool:
    """Whether a JSON text opens as many brackets as must be looked at; a part lies in two or three of the payload."""
    return text.count("{") + text.count("[") >= NESTING_MAX - 2


_PLAIN = Redactor()


def scrub(value: Any) -> Any:
    """`Redactor.scrub` with the known patterns only."""
    return _PLAIN.scrub(value)


def apply_mode(payload: Mapping[str, Any], mode: str, redactor: Redactor = _PLAIN) -> dict[str, Any]:
    """A rollout's payload as the key's log mode lets it be logged, without secrets in any mode."""
    return redactor.apply_mode(payload, mode)


def _without_text(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, names of things and the shape of the plan."""
    no_tokens: dict[str, Any] = {name: [] for name in TOKEN_FIELDS}
    rounds = [{**one, **_NO_TEXT_ROUND, **no_tokens, "plan": _shape(one.get("plan"))} for one in payload["rounds"]]
    steps = [{**one, **_NO_TEXT_STEP, "attempts": _without_why(one.get("attempts"))} for one in payload["steps"]]
    error = payload.get("error")
    gone = {
        "request": _numbers(payload.get("request")),
        "reply": None,
        "error": {name: error.get(name) for name in ("type", "code")} if isinstance(error, Mapping) else None,
        "tags": {},
    }
    return {**payload, **gone, "rounds": rounds, "steps": steps}


def _without_why(attempts: Any) -> list[Any]:
    """Attempts without text: verdicts say how, and not why, since a reason may quote the reply; tools are named."""
    return [_attempt_without_text(one) if isinstance(one, dict) else one for one in attempts or ()]


def _attempt_without_text(attempt: dict[str, Any]) -> dict[str, Any]:
    gone = {"verdict": {**attempt["verdict"], "why": ""}} if attempt.get("verdict") else {}
    return attempt | gone | ({"tool": {**attempt["tool"], "arguments": None}} if attempt.get("tool") else {})


def _numbers(request: Any) -> dict[str, Any]:
    """The parameters of a request that hold no text: numbers and switches, and the model asked for."""
    if not isinstance(request, Mapping):
        return {}
    return {k: v for k, v in request.items() if k == "model" or isinstance(v, int | float | bool) or v is None}


def _shape(plan: Any) -> Any:
    """A plan without its task texts."""
    if not isinstance(plan, Mapping) or not isinstance(plan.get("steps"), list):
        return None
    return {"steps": [{"worker": s.get("worker"), "task": None, "see": s.get("see")} for s in plan["steps"]]}


def _without_personal(text: str) -> str:
    if "@" in text:
        text = _EMAIL.sub("[email]", text)
    text = _IBAN.sub(lambda match: "[iban]" if _mod97(match[0]) else match[0], text)
    text = _DIGITS.sub(lambda match: "[card]" if luhn(match[0]) else match[0], text)
    return _PHONE.sub(lambda match: "[phone]" if _is_phone(match[0]) else match[0], text)


def luhn(text: str) -> bool:
    """Whether the digits in `text` are a payment card's by number and check digit (ISO/IEC 7812-1, annex B)."""
    digits = [int(char) for char in text if char.isdigit()]
    doubled = sum(sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    return 13 <= len(digits) <= 19 and any(digits) and (sum(digits[-1::-2]) + doubled) % 10 == 0


def _mod97(text: str) -> bool:
    """Whether an IBAN's check digits are right (ISO 13616)."""
    plain = text.replace(" ", "")
    return 15 <= len(plain) <= 34 and int("".join(str(int(char, 36)) for char in plain[4:] + plain[:4])) % 97 == 1


def _is_phone(text: str) -> bool:
    return 8 <= sum(char.isdigit() for char in text) <= 15
