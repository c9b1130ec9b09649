// Why a request went where it went: the explanation of the admin API. All of it reaches the page as text.

import { badge, h, ms, table, usd } from "./dom.js";

const NANO_PER_USD = 1e9;

/** A probability, or the bounds that the log gives. */
function chance(value) {
  if (value === null || value === undefined) return "unknown";
  if (typeof value === "number") return value.toPrecision(3);
  return `${value.at_least.toPrecision(3)} to ${value.at_most.toPrecision(3)}`;
}

function fixed(value) {
  return value === null || value === undefined ? "–" : value.toFixed(2);
}

/** A weight of evidence, which need not be a whole number. */
function brief(value) {
  return String(Number(value.toFixed(1)));
}

const ALTERNATIVES = [
  ["Step", "n", (row) => row.step],
  ["Worker", "", (row) => row.worker],
  ["Plan", "", (row) => (row.chosen ? badge("chosen", "good") : "")],
  ["Probability", "n", (row) => chance(row.probability)],
  ["Source", "", (row) => row.source ?? "–"],
];
const ARMS = [
  ["Worker", "", (row) => row.worker],
  ["Choice", "", (row) => (row.chosen ? badge("chosen", "good") : "")],
  ["Right of alike", "n", (row) => (row.n === undefined ? "–" : `${brief(row.right)} of ${brief(row.n)}`)],
  ["Success", "n", (row) => fixed(row.success)],
  ["95 % interval", "n", (row) => (row.low === undefined ? "–" : `${fixed(row.low)} to ${fixed(row.high)}`)],
  ["Time", "n", (row) => (row.latency_s === undefined ? "–" : ms(row.latency_s * 1000))],
  ["Cost", "n", (row) => (row.usd === undefined ? "–" : usd(row.usd * NANO_PER_USD))],
  ["Bonus", "n", (row) => fixed(row.bonus)],
  ["Utility", "n", (row) => fixed(row.utility)],
  ["Probability", "n", (row) => chance(row.propensity)],
];
const VERDICTS = [
  ["Step", "n", (row) => row.step],
  ["Checker", "", (row) => row.by ?? row.worker],
  ["Verdict", "", (row) => ({ true: "accepted", false: "rejected" }[row.accept] ?? "could not judge")],
  ["Why", "", (row) => row.why ?? "–"],
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

/** Every worker at every step of a plan, with its probability. */
function choicesOf(each) {
  return each.steps.flatMap((step) => step.alternatives.map((one) => ({ ...one, step: step.step })));
}

function decision(each, deciding) {
  const plan = each.plan;
  const choices = each === deciding ? [] : choicesOf(each);
  const over = plan.choices === undefined ? "" : ` over ${plan.choices} choices`;
  return h("article", {},
    h("h3", {}, `Round ${each.round} at depth ${each.depth}: ${each.planner}`),
    note(plan.probability === null ? `The plan's probability is unknown: ${plan.unknown}.`
      : `The plan had probability ${chance(plan.probability)}${over}, as logged.`),
    each.why ? note(`The planner's reason: ${each.why}`) : null,
    choices.length ? table("Alternatives at each step", ALTERNATIVES, choices) : null,
    each.shown.experience.length ? table("Experience that the planner was shown", EXPERIENCE, each.shown.experience) : null,
    each.shown.examples.map((one) => note(`Shown as an example: ${one.question}`)));
}

/** What a right answer was worth to whom. */
function worth(each) {
  const amounts = [each.usd === null ? null : usd(each.usd * NANO_PER_USD), each.seconds === null ? null : `${each.seconds} s`];
  const known = amounts.filter((one) => one !== null);
  return note(known.length ? `A right answer is worth ${known.join(" or ")} (by ${each.by}).` : `Only right answers count (by ${each.by}).`);
}

/** The table of what decided: utilities where a router compared them, else the probabilities of a learned plan. */
function decided(each, deciding) {
  const arms = each.arms.some((one) => one.bonus) ? ARMS : ARMS.filter(([name]) => name !== "Bonus");
  const choices = deciding ? choicesOf(deciding).filter((one) => one.probability !== null) : [];
  const age = each.memory?.state === "stale" && each.memory.age_s ? `, ${Math.round(each.memory.age_s)} s old` : "";
  return [
    each.arms.length ? table("What decided", arms, each.arms) : null,
    !each.arms.length && choices.length ? table("What decided", ALTERNATIVES, choices) : null,
    each.worth ? worth(each.worth) : null,
    each.verdicts.length ? table("What checkers said", VERDICTS, each.verdicts) : null,
    each.memory ? note(`The experience was ${each.memory.state}${age}.`) : null,
  ];
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

/** Of a rollout's page: `first`, the sentence and the table of what decided, and `rest`, the section with all else. */
export async function explanation(api, id) {
  const why = await api(`admin/rollouts/${encodeURIComponent(id)}/explain`);
  const instead = why.counterfactual;
  const deciding = why.decisions.find((each) => each.rollout_id === why.rollout_id && each.round === why.decided.round);
  const unseen = why.hidden.filter((step) => step.hidden.length || step.cut);
  const first = h("section", { id: "sentence" }, h("p", { class: "lead" }, why.sentence), decided(why.decided, deciding));
  const rest = h("section", { id: "why" }, h("h2", {}, "Why it went this way"),
    why.turn ? turn(why.turn) : null,
    why.decisions.map((each) => decision(each, deciding)),
    unseen.length ? table("What steps did not see", HIDDEN, unseen) : null,
    why.forbidden.length ? [h("h3", {}, "Ruled out"), h("ul", {}, why.forbidden.map((one) => h("li", {}, `${one.by}: ${one.what}`)))] : null,
    notShown(why.not_shown),
    instead.workers.length ? [
      h("h3", {}, "Had it gone to one worker alone"), note(`From ${instead.likeness || "no other requests"}; ${instead.method}.`),
      table("Judgement of each worker alone", INSTEAD, instead.workers)] : null);
  return { first, rest };
}
