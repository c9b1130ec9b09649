// The sampled tokens of a plan. The log keeps ids, not texts, so the text stands beside each run of tokens of one kind.

import { h } from "./dom.js";

const LEVELS = [[0.9, "90 % and over"], [0.5, "50 to 90 %"], [0.1, "10 to 50 %"], [0.01, "1 to 10 %"], [-1, "under 1 %"]];
const TASK = /"task"\s*:\s*"((?:[^"\\]|\\.)*)/dg; // as the gateway tells decisions from task text

function level(logprob) {
  const p = logprob === null ? 0 : Math.exp(logprob);
  return LEVELS.findIndex(([least]) => p >= least);
}

/** Runs of tokens of one kind: {decides, tokens: [id, log-prob]}. */
function runsOf(round) {
  const runs = [];
  round.plan_token_ids.forEach((id, i) => {
    const decides = round.decision_mask[i] ?? true;
    if (runs.at(-1)?.decides !== decides) runs.push({ decides, tokens: [] });
    runs.at(-1).tokens.push([id, round.plan_logprobs[i] ?? null]);
  });
  return runs;
}

/** The plan's text in the same runs; null where a token crosses a border, so that the two do not match. */
function textsOf(round, runs) {
  const plan = round.plan_text ?? "";
  const texts = [];
  let from = 0;
  for (const match of plan.matchAll(TASK)) {
    const [start, end] = match.indices[1];
    if (start === end) continue;
    texts.push(plan.slice(from, start), plan.slice(start, end));
    from = end;
  }
  if (from < plan.length) texts.push(plan.slice(from));
  return texts.length === runs.length ? texts : null;
}

function chip([id, logprob], decides) {
  const chance = logprob === null ? "impossible" : `log-prob ${logprob.toFixed(3)}, p = ${Math.exp(logprob).toPrecision(3)}`;
  return h("span", { class: `token p${level(logprob)} ${decides ? "decides" : ""}`, title: `${chance}, ${decides ? "a decision" : "task text"}` }, String(id));
}

/** The tokens of one round with their legend. */
export function tokens(round) {
  const runs = runsOf(round);
  if (!runs.length) return h("p", { class: "note" }, "None in the log: none came, or the log mode or a redaction keeps them out.");
  const texts = textsOf(round, runs);
  const decided = runs.filter((run) => run.decides).flatMap((run) => run.tokens);
  const sum = decided.reduce((total, [, logprob]) => total + (logprob ?? -Infinity), 0);
  return [
    h("p", { class: "note" }, `${decided.length} of ${round.plan_token_ids.length} are decisions; their log-probs sum to ${sum.toFixed(2)}.`),
    h("ul", { class: "legend" }, LEVELS.map(([, name], i) => h("li", {}, h("i", { class: `p${i}` }), name)),
      h("li", {}, h("i", { class: "decides" }), "outlined: a decision")),
    runs.map((run, i) => h("div", { class: "run" }, texts ? h("code", {}, texts[i]) : null,
      h("div", { class: "tokens" }, run.tokens.map((token) => chip(token, run.decides))))),
  ];
}
