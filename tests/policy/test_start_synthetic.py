"""The warm start: what samples show and ask for, what the tokenizer keeps whole, what training and export promise."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from gateway.core.loop.plan import plan_schema, validate
from gateway.core.loop.prompt import PROMPT_VERSION, prompt_hash
from gateway.core.loop.shown import ShownExperience, ShownWorker
from policy.serve.tokens import JSON_STYLE
from policy.simulators import HANDLES
from policy.simulators.arena.families.family import SKILLS, Family
from policy.simulators.arena.families.tasks import FAMILIES, INSTRUCTIONS, make_task
from policy.start.synthetic.__main__ import command, parse, tokenizer_for
from policy.start.synthetic.config import WORKERS_MAX, ModelConfig, TrainConfig
from policy.start.synthetic.export import hf_config
from policy.start.synthetic.feed import IGNORED, batches_from, draw_chunk, encode
from policy.start.synthetic.label import Plan, arena_label, general_label
from policy.start.synthetic.samples import LEVELS, Level, Sample, make_drill, make_sample, shown_replies
from policy.start.synthetic.tokenizer import END_ID, prompt_text, train_tokenizer
from policy.start.synthetic.wording import (
    OTHERS,
    SENTENCES,
    add_noise,
    exchange_words,
    general_question,
    reword,
    sentences_of,
)

SUM = (
    "There are 23 shelves and every shelf carries 33 seeds. If Omar takes 67 seeds home, what is the number that stays?"
)
FREIGHT = "Weights in kilograms: rice: 17; corn: 42. What does corn weigh in grams? Give the number of grams."
RIDDLE = "Find the first number greater than 90 which is a multiple of 4 and has remainder 3 after division by 7."


@cache
def samples() -> tuple[Sample, ...]:
    return tuple(make_sample(7, index) for index in range(600))


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer((t for s in samples() for t in (prompt_text(s.prompt), s.label, s.label)), 1_536)


def worker(handle: str, *tags: str, tier: int = 2, right: float | None = None, latency_s: float = 0.1) -> ShownWorker:
    seen = None if right is None else ShownExperience(20, right, 1, 1)
    return ShownWorker(handle, "", tags, tier, 8192, latency_s, seen)


def named(plan: Plan) -> list[str]:
    return [step["worker"] for step in plan["steps"]]


# ---------------------------------------------------------------- samples


def test_a_sample_is_a_function_of_seed_and_index() -> None:
    again = make_sample(7, 3)
    assert (again.prompt, again.label) == (samples()[3].prompt, samples()[3].label)
    assert make_sample(8, 3).prompt != again.prompt


def test_the_lessons_of_a_seed_never_change() -> None:
    """A manifest promises its weights for a seed. A change here changes them: rebuild the shipped conductor with it."""
    lessons = hashlib.sha256()
    for sample in samples()[:400]:
        lessons.update(f"{sample.prompt}\0{sample.label}\0".encode())
    for level in LEVELS:
        for index in range(25):
            drill = make_drill(7, index, level)
            lessons.update(repr((drill.text, drill.pieces)).encode())
    assert lessons.hexdigest() == "adc7344493a0095e5b5dcca76d5c164a071ade498c87516673727c5931da962c"


def test_every_label_is_a_plan_that_its_prompt_allows() -> None:
    for sample in samples():
        assert validate(sample.label, sample.allowed).as_json() == sample.plan


def test_labels_are_what_constrained_decoding_writes() -> None:
    guide = LLTokenizer(tokenizer().to_str(), eos_token=[END_ID])
    for sample in samples()[:120]:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(plan_schema(sample.allowed)), overrides=JSON_STYLE)
        matcher = LLMatcher(guide, grammar)
        assert matcher.consume_tokens(tokenizer().encode(sample.label, add_special_tokens=False).ids), sample.label
        assert matcher.is_accepting()


def test_samples_show_everything_that_a_prompt_can_show() -> None:
    shown = [sample.shown for sample in samples()]
    assert {len(s.workers) for s in shown} >= set(range(2, WORKERS_MAX + 1))
    assert {s.round for s in shown} == {1, 2}
    assert {s.depth_left for s in shown} == {0, 1, 2}
    assert {len(s.plan["steps"]) for s in samples()} == {0, 1, 2, 3, 4, 5}
    assert any(all(w.experience is None for w in s.workers) for s in shown)
    assert any(all(w.experience is not None for w in s.workers) for s in shown)
    assert {w.handle for s in shown for w in s.workers} > {*HANDLES, "vote", "self"}
    assert any("<request>" in s.prompt and INSTRUCTIONS[1] in s.prompt for s in samples())
    assert not any("planner" in w.tags for s in shown if s.depth_left == 0 for w in s.workers)


def test_a_double_question_becomes_two_child_loops_where_loops_are_left_and_offered() -> None:
    task = next(task for task in map(make_task, range(200)) if task.shape == "child")
    pool = [worker("oak", "tables", "strings"), worker("self", "planner", tier=0)]
    steps = arena_label(task.text, None, pool, 5)["steps"]
    assert [(s["worker"], s["task"]) for s in steps] == [
        ("self", INSTRUCTIONS[0]),
        ("self", INSTRUCTIONS[1]),
        ("oak", None),
    ]
    assert steps[2]["see"] == [0, 1]


# ---------------------------------------------------------------- labels read what is shown


def test_experience_overrules_tags_and_price() -> None:
    dear, cheap = worker("oak", "arithmetic", tier=3), worker("elm", "arithmetic", tier=1)
    assert named(arena_label(SUM, None, [cheap, dear], 5)) == ["oak"]
    liar = worker("oak", "arithmetic", tier=3, right=0.2)
    assert named(arena_label(SUM, None, [liar, cheap], 5)) == ["elm"]
    untagged = worker("fir", "writing", right=1.0)
    assert named(arena_label(SUM, None, [liar, untagged], 5)) == ["fir"]


def test_price_decides_between_equals_and_speed_after_it() -> None:
    right = [worker("oak", "arithmetic", tier=4, right=0.9), worker("elm", "arithmetic", tier=1, right=0.9)]
    assert named(arena_label(SUM, None, right, 5)) == ["elm"]
    slow = [worker("oak", "arithmetic", latency_s=20.0), worker("elm", "arithmetic")]
    assert named(arena_label(SUM, None, slow, 5)) == ["elm"]


def test_a_chain_passes_results_on_and_an_unsolvable_question_goes_to_the_cheapest() -> None:
    pool = [worker("oak", "tables"), worker("elm", "units"), worker("fir", "logic", tier=1)]
    steps = arena_label(FREIGHT, None, pool, 5)["steps"]
    assert [(s["worker"], s["see"]) for s in steps] == [("oak", []), ("elm", [0])]
    assert named(arena_label(SUM, None, pool, 5)) == ["fir"]


def test_a_vote_is_cut_to_the_steps_allowed() -> None:
    solvers = [worker(handle, "logic", tier=1) for handle in ("oak", "elm", "fir")]
    pool = [*solvers, worker("vote", "majority", tier=0)]
    whole = arena_label(RIDDLE, None, pool, 5)["steps"]
    assert [s["worker"] for s in whole] == ["oak", "elm", "fir", "vote"]
    assert whole[3]["see"] == [0, 1, 2]
    assert named(arena_label(RIDDLE, None, pool, 2)) == ["oak"]


def test_a_general_question_goes_to_the_best_known_else_to_the_cheapest() -> None:
    pool = [worker("oak", "logic", tier=3), worker("vote", "majority", tier=0), worker("elm", "dates", tier=1)]
    assert named(general_label(pool)) == ["elm"]
    assert named(general_label([*pool, worker("fir", "code", tier=4, right=0.9)])) == ["fir"]


# ---------------------------------------------------------------- words


def test_noise_leaves_names_numbers_and_lists_alone() -> None:
    rng = Random(1)
    text = 'Ann, Ben and Cara: "silver" costs 42; pear: 7; plum: 12. 3 May 2024 (YYYY-MM-DD)'
    kept = {word for word in text.split() if not (word.isalpha() and word.islower())}
    heard = [add_noise(rng, text) for _ in range(500)]
    assert all(kept <= set(words.split()) for words in heard)
    assert len(set(heard)) > 20


def test_general_questions_fill_all_their_slots() -> None:
    rng = Random(2)
    for long in (False, True):
        texts = {general_question(rng, long=long) for _ in range(100)}
        assert len(texts) > 20
        assert not any("{filler}" in text or "{a}" in text or "{n1}" in text for text in texts)


def plain_runs(pattern: str) -> set[tuple[str, ...]]:
    """Runs of four words without a slot among them."""
    words = re.findall(r"\{\w+\}|[a-z]+", pattern.lower())
    runs = (tuple(words[at : at + 4]) for at in range(len(words) - 3))
    return {run for run in runs if not any("{" in word for word in run)}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_paraphrases_leave_the_held_out_phrasings_held_out(family: Family) -> None:
    known = {run for phrasing in family.train for run in plain_runs(phrasing.pattern)}
    held_out = {run for phrasing in family.held_out for run in plain_runs(phrasing.pattern)} - known
    assert not held_out & {run for pattern in SENTENCES[family.name] for run in plain_runs(pattern)}
    rng = Random(5)
    own = (*SENTENCES[family.name], *(phrasing.pattern for phrasing in family.train))
    for _ in range(100):
        for pattern in own:
            assert not held_out & plain_runs(exchange_words(rng, pattern))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_wording_asks_with_all_that_the_question_holds(family: Family) -> None:
    assert len(set(SENTENCES[family.name])) == len(SENTENCES[family.name]) >= 17
    values = family.draw(Random(3))
    for pattern in SENTENCES[family.name]:
        written = pattern.format_map(values)
        assert "{" not in written
        assert all(values[slot] in written for slot in re.findall(r"\{(\w+)\}", pattern))
        assert set(re.findall(r"\{(\w+)\}", pattern)) >= set(values) - {"who", "who1"}


@pytest.mark.parametrize("sentence", ["Sort {numbers}.", "Sort this.", ""])
def test_a_sentence_that_lacks_a_slot_is_refused(sentence: str) -> None:
    family = next(family for family in FAMILIES if family.name == "sorting")
    assert sentences_of((family,), {"sorting": "Sort {nums}.\nOrder {nums}.\n"})["sorting"][1] == "Order {nums}."
    with pytest.raises(ValueError, match="must"):
        sentences_of((family,), {"sorting": f"{sentence}\n"})
    with pytest.raises(ValueError, match="families that are not in both"):
        sentences_of((family,), {"sorting": "Sort {nums}.", "juggling": "Go!"})


def test_exchanged_words_leave_slots_and_signs_alone() -> None:
    rng = Random(6)
    pattern = "Sort {nums} so that the biggest, {letter1}, comes first. Give the list."
    found = {exchange_words(rng, pattern) for _ in range(400)}
    assert pattern in found
    assert len(found) > 10
    for text in found:
        assert re.findall(r"\{\w+\}|[.,]", text) == re.findall(r"\{\w+\}|[.,]", pattern)
        assert len(text.split()) == len(pattern.split())
    assert all(word not in others and word in OTHERS[others[0]] for word, others in OTHERS.items())


def test_a_question_is_reworded_with_the_same_values() -> None:
    rng = Random(4)
    task = next(task for task in map(make_task, range(200)) if task.shape == "child")
    for text in (SUM, RIDDLE, task.text):
        others = {reword(rng, text) for _ in range(40)}
        assert len(others) > 5
        figures = sorted(re.findall(r"\d+", text))
        assert all(set(figures) <= set(re.findall(r"\d+", other)) for other in others)
    assert reword(rng, "Hello!") == "Hello!"


def test_digests_name_agreement_failure_and_partial_results() -> None:
    replies = ["Answer: 4", "So it is.\nAnswer: 4", "Partial 1 of 2: 9", "lost"]
    shown = shown_replies(["oak", "elm", "fir", "ash"], replies, {3})
    assert [reply.answer for reply in shown] == ["4", "4", "Partial 1 of 2: 9", None]
    assert [reply.flags for reply in shown] == [(), ("agrees:0",), (), ("failed",)]


# ---------------------------------------------------------------- tokenizer


@pytest.mark.parametrize("text", ["$", "$$", "$$$", "$$$$", "free", "fast", *(f"right{n}" for n in range(11))])
def test_each_word_of_a_pool_line_is_one_token(text: str) -> None:
    assert tokenizer().encode(f" {text}").tokens == [f"Ġ{text}"]


def test_a_handle_is_one_token_and_the_same_in_pool_and_plan() -> None:
    for handle in (*HANDLES, "vote", "self"):
        token = tokenizer().token_to_id(handle)
        assert token is not None, handle
        assert tokenizer().encode(f"\n{handle} logic").ids[1] == token
        plan = tokenizer().encode(f'{{"steps":[{{"worker":"{handle}","task":null,"see":[]}}]}}')
        assert plan.ids[1] == token
        assert len(plan.ids) == 4


def test_any_text_survives_the_tokenizer() -> None:
    for text in ("héllo\n\twörld 42 — ✓ {}[]\"'", '{"steps":[]}', "right11 right1 rightful $$$$$"):
        assert tokenizer().decode(tokenizer().encode(text).ids, skip_special_tokens=False) == text


# ---------------------------------------------------------------- drills and batches


@pytest.mark.parametrize("level", LEVELS)
def test_a_drill_names_the_best_worker_of_every_skill_that_its_lines_show(level: Level) -> None:
    for index in range(40):
        drill = make_drill(7, index, level)
        assert drill == make_drill(7, index, level)
        lines = [line.split() for line in drill.text.splitlines()]
        given = [piece.text[1:] for piece in drill.pieces if not piece.learnt]
        assert {word for line in lines for word in line} & set(SKILLS) <= set(given)
        skill = ""
        for piece in drill.pieces:
            skill = skill if piece.learnt else piece.text[1:]
            if piece.learnt:
                (line,) = [line for line in lines if line[0] == piece.text]
                assert skill in line or {"right5", "right6", "right7", "right8", "right9", "right10"} & set(line)


def test_drills_grow_from_two_bare_lines_to_whole_pools() -> None:
    easiest, hardest = ([make_drill(7, index, level).text for index in range(80)] for level in (LEVELS[0], LEVELS[-1]))
    assert {text.count("\n") for text in easiest} == {2, 3}
    assert not any("right" in text or "majority" in text for text in easiest)
    assert all(len(set(line.split()) & set(SKILLS)) == 1 for text in easiest for line in text.splitlines())
    assert max(text.count("\n") for text in hardest) == WORKERS_MAX + 2
    assert any("right" in text for text in hardest)


def test_a_row_asks_only_for_what_is_to_be_learnt() -> None:
    drill = make_drill(7, 0, LEVELS[-1])
    drilled, *planned = encode(tokenizer(), [drill, *samples()[:200]])
    for row in (drilled, *planned):
        assert len(row.ids) == len(row.targets)
        assert all(row.ids[at + 1] == target for at, target in enumerate(row.targets) if target != IGNORED)
    asked = tokenizer().decode([target for target in drilled.targets if target != IGNORED])
    assert asked == "".join(piece.text for piece in drill.pieces if piece.learnt)
    for row, sample in zip(planned, samples(), strict=False):
        plan = [*tokenizer().encode(sample.label).ids, END_ID]
        assert row.ids == [*tokenizer().encode(sample.text).ids, *plan]
        assert [target for target in row.targets if target != IGNORED] == plan


def test_hints_stand_at_line_ends_and_before_the_handles_they_explain() -> None:
    sample = next(s for s in samples() if s.purposes == ("logic", "logic", "logic", "majority"))
    (row,) = encode(tokenizer(), [sample])
    text, tokens = sample.text, tokenizer()
    said = [
        (tokens.decode(row.ids[: at + 1], skip_special_tokens=False), tokens.decode(hint)) for at, hint in row.hints
    ]
    for worker in sample.shown.workers:
        assert [line for before, line in said if before.endswith(f"\n{line}\n") and line.startswith(worker.handle)]
    choices = [(before, hint.strip()) for before, hint in said if before.endswith('"worker":"')]
    assert [hint for _, hint in choices] == list(sample.purposes)
    assert all((text + sample.label).startswith(before) for before, _ in choices)


def test_purposes_are_tags_of_the_workers_chosen() -> None:
    for sample in samples():
        tags = {worker.handle: worker.tags for worker in sample.shown.workers}
        assert len(sample.purposes) in (0, len(sample.plan["steps"]))
        for step, purpose in zip(sample.plan["steps"], sample.purposes, strict=False):
            assert purpose == "" or purpose in tags[step["worker"]]


def test_chunks_hold_drills_first_and_plans_in_the_end() -> None:
    config = TrainConfig(steps=40, batch=4, chunk_steps=4, drill_shares=(0.5,), drills_later=0.125)
    serialised = tokenizer().to_str()
    first, last = draw_chunk(serialised, config, 0), draw_chunk(serialised, config, 9)
    assert [len(batch) for batch in first] == [4] * 4
    assert first == draw_chunk(serialised, config, 0)
    assert not any(END_ID in row.targets for batch in first for row in batch)
    assert sum(END_ID in row.targets for batch in last for row in batch) == 16 - 2


def test_batches_go_on_from_any_step() -> None:
    config = TrainConfig(steps=10, batch=2, chunk_steps=4, drill_shares=())
    whole = list(batches_from(tokenizer(), config, 0))
    assert len(whole) == 12
    assert list(batches_from(tokenizer(), config, 7)) == whole[7:]


# ---------------------------------------------------------------- settings


def test_rates_rise_stay_and_fall_and_pools_grow() -> None:
    config = TrainConfig(steps=1_000, warmup_steps=100, decay_share=0.4, drill_shares=(0.3, 0.1), pool_growth_share=0.2)
    assert [round(config.rate(step), 2) for step in (0, 49, 99, 500, 800, 999)] == [0.01, 0.5, 1.0, 1.0, 0.5, 0.02]
    assert [config.drill_level(step) for step in (0, 299, 300, 399, 400)] == [0, 0, 1, 1, None]
    assert [config.workers_max(step) for step in (0, 400, 500, 600, 999)] == [4, 4, 6, 8, 8]


def test_the_manifests_command_rebuilds_the_same_settings() -> None:
    options = parse(["--out", "DIR", "--steps", "12", "--hidden", "64", "--lr", "0.01", "--version", "3"])
    again = parse(command(options).split()[3:])
    assert vars(again) == vars(options)
    assert "--hidden 64" in command(options)
    assert "--layers" not in command(options)


# ---------------------------------------------------------------- training (needs torch)

MICRO = ["--steps", "12", "--batch", "4", "--chunk-steps", "4", "--hidden", "32", "--inner", "32"]
MICRO += ["--heads", "1", "--heads-kv", "1", "--layers", "2", "--tokenizer-samples", "60", "--vocab", "420"]
MICRO += ["--checkpoint-steps", "4", "--report-steps", "1000", "--context", "512"]


def _program(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "policy.start.synthetic", "--out", str(out), *MICRO, *more]


@pytest.mark.train
def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the train extra is not installed")
    subprocess.run(_program(tmp_path / "whole"), check=True, timeout=120)
    running = subprocess.Popen(_program(tmp_path / "cut"))
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "cut.work" / "checkpoint.pt").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (tmp_path / "cut").exists()
    subprocess.run(_program(tmp_path / "cut", "--resume"), check=True, timeout=120)
    whole, cut = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


@pytest.mark.train
def test_the_server_computes_what_was_trained(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the train extra is not installed")
    from safetensors.numpy import load_file

    from policy.serve.manifest import read_complete
    from policy.serve.runtime import Runtime
    from policy.start.synthetic.__main__ import main
    from policy.start.synthetic.model import Qwen2

    assert main(["--out", str(tmp_path / "m"), *MICRO]) == 0
    manifest = read_complete(tmp_path / "m").manifest
    assert (manifest.prompt_hash, manifest.prompt_version) == (prompt_hash("compact"), f"compact-{PROMPT_VERSION}")
    tokens = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    shape = ModelConfig(layers=2, hidden=32, inner=32, heads=1, heads_kv=1, context=512)
    model = Qwen2(shape, tokens.get_vocab_size())
    stored = load_file(tmp_path / "m" / "model.safetensors")
    model.load_state_dict({name: torch.from_numpy(array) for name, array in stored.items()})
    ids = tokens.encode(prompt_text(samples()[0].prompt)).ids
    runtime = Runtime(tmp_path / "m")
    logits, _ = runtime.forward(ids, runtime.empty())
    with torch.no_grad():
        trained = model(torch.tensor([ids]), torch.tensor([[len(ids) - 1]]))[0][0, 0].numpy()
    assert np.abs(logits - trained).max() < 1e-3


def test_resuming_takes_the_tokenizer_of_the_first_run(tmp_path: Path) -> None:
    config = TrainConfig(tokenizer_samples=40, vocab=400)
    first = tokenizer_for(config, tmp_path / "tokenizer.json", resume=False)
    again = tokenizer_for(replace(config, vocab=300), tmp_path / "tokenizer.json", resume=True)
    assert again.to_str() == first.to_str()


def test_the_exported_configuration_is_one_the_server_takes() -> None:
    from policy.serve.shape import Shape

    shape = Shape.from_config(hf_config(ModelConfig(), 1_536))
    assert (shape.layers, shape.heads, shape.head_dim, shape.tied, shape.eos_ids) == (4, 3, 32, False, (END_ID,))
