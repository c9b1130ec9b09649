// Why a request went where it went: the explanation of the admin API. All of it reaches the page as text.

import { badge, h, table, usd } from "./dom.js";

/** A probability, or the bounds that the log gives. */
function chance(value) {
  if (value === null || value === undefined) return "unknown";
  if (typeof value === "number") return value.toPrecision(3);
  return `${value.at_least.toPrecision(3)} to ${value.at_most.toPrecision(3)}`;
}

const ALTERNATIVES = [
  ["Step", "n", (row) => row.step],
  ["Worker", "", (row) => row.worker],
  ["Plan", "", (row) => (row.chosen ? badge("chosen", "good") : "")],
  ["Probability", "n", (row) => chance(row.probability)],
  ["Source", "", (row) => row.source ?? "–"],
];
const EXPERIENCE = [
  ["Worker", "", (row) => row.worker],
  ["Judged alike", "n", (row) => row.n],
  ["Right", "n", (row) => Number(row.success).toFixed(2)],
  ["Milliseconds", "n", (row) => row.ms],
];
const HIDDEN = [
  ["Step", "n", (row) => row.step],
  ["Worker", "", (row) => row.worker],
  ["Saw steps", "", (row) => row.saw.join(", ") || "none"],
  ["Hidden from it", "", (row) => row.hidden.join(", ") || "nothing"],
  ["The conversation", "", (row) => (row.cut ? "seen in part" : { true: "seen", false: "hidden" }[row.conversation] ?? "unknown")],
];
const INSTEAD = [
  ["Worker alone", "", (row) => row.worker],
  ["Judgement", "n", (row) => (row.estimate === undefined ? "unknown" : row.estimate.toFixed(2))],
  ["95 % interval", "n", (row) => (row.estimate === undefined ? "–" : `${row.low.toFixed(2)} to ${row.high.toFixed(2)}`)],
  ["Tried", "n", (row) => `${row.tried} of ${row.alike}`],
  ["Why unknown", "", (row) => row.unknown ?? "–"],
];

function note(...content) {
  return h("p", { class: "note" }, content);
}

function decision(each) {
  const plan = each.plan;
  const choices = each.steps.flatMap((step) => step.alternatives.map((one) => ({ ...one, step: step.step })));
  return h("article", {},
    h("h3", {}, `Round ${each.round} at depth ${each.depth}: ${each.planner}`),
    note(plan.probability === null ? `The plan's probability is unknown: ${plan.unknown}.`
      : `The plan had probability ${chance(plan.probability)} over ${plan.choices} choices, as logged.`),
    each.why ? note(`The planner's reason: ${each.why}`) : null,
    choices.length ? table("Alternatives at each step", ALTERNATIVES, choices) : null,
    each.shown.experience.length ? table("Experience that the planner was shown", EXPERIENCE, each.shown.experience) : null,
    each.shown.examples.map((one) => note(`Shown as an example: ${one.question}`)));
}

function notShown(left) {
  if (left.workers === null) return note(`Workers that were not shown: unknown, ${left.unknown}.`);
  const drawn = Object.entries(left.drawn).map(([name, share]) => note(`Drawn at random: ${name}, probability ${chance(share)}.`));
  const key = left.by_key.length ? note(`Left out by the key: ${left.by_key.join(", ")}.`) : null;
  return [left.workers.length ? note(`Not shown to the planner: ${left.workers.join(", ")} (${left.reason}).`) : null, key, drawn];
}

/** Why a turn of a conversation went back to its worker, or did not. */
function turn(each) {
  const grounds = ["distance", "fault", "cap", "better"].filter((name) => name in each).map((name) => `${name} ${each[name]}`);
  const way = each.kept ? `went back to ${each.worker}` : `was planned anew, with ${each.worker} warm`;
  const cache = each.worth_nano ? ` Leaving it costs a cached prompt of ${usd(each.worth_nano)}.` : "";
  return note(`This turn of a conversation ${way}: ${[each.why, ...grounds].join(", ")}.${cache}`);
}

/** The section of a rollout's page. */
export async function explanation(api, id) {
  const why = await api(`admin/rollouts/${encodeURIComponent(id)}/explain`);
  const instead = why.counterfactual;
  return h("section", { id: "why" }, h("h2", {}, "Why it went this way"),
    why.turn ? turn(why.turn) : null,
    why.decisions.map(decision),
    why.hidden.length ? table("What each step saw", HIDDEN, why.hidden) : null,
    h("h3", {}, "Ruled out"), h("ul", {}, why.forbidden.map((one) => h("li", {}, `${one.by}: ${one.what}`))), notShown(why.not_shown),
    h("h3", {}, "Had it gone to one worker alone"), note(`From ${instead.likeness || "no other requests"}; ${instead.method}.`),
    instead.workers.length ? table("Judgement of each worker alone", INSTEAD, instead.workers) : null);
}
