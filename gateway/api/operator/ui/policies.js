// Policy versions: their states, lineage and moves, the comparison in progress, the latest events; one with its gate report.

import { ask } from "./dialog.js";
import { badge, button, choice, clock, count, facts, fold, h, table, usd } from "./dom.js";
import { text } from "./rollout.js";

const EVENTS_SHOWN = 5;
const OLD_SHOWN = 3; // retired versions; `baton policy list` lists all
const KIND = { live: "good", canary: "odd", shadow: "odd" };

const rate = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));

/** The share of requests that a version plans, among those that name no version. */
function share(row, rows) {
  const canary = rows.find((one) => one.state === "canary");
  if (row.state === "canary") return `${row.percent} %`;
  return row.state === "live" ? `${100 - (canary?.percent ?? 0)} %` : "–";
}

function columns(rows) {
  return [
    ["Version", "", (row) => h("a", { href: `#/policies/${encodeURIComponent(row.version)}` }, row.version)],
    ["State", "", (row) => badge(row.state, KIND[row.state] ?? "")],
    ["Share", "n", (row) => share(row, rows)],
    ["Engines", "", (row) => (row.held ? "hold it" : "–")],
    ["From", "", (row) => row.parent ?? "–"],
    ["Rollouts", "n", (row) => count(row.rollouts)],
    ["Gate", "", (row) => ({ true: "passed", false: "refused" })[row.gated] ?? "none"],
    ["Since", "", (row) => clock(row.changed_at)],
  ];
}

const COMPARED = [
  ["Version", "", (row) => row.version],
  ["Requests", "n", (row) => count(row.requests)],
  ["Plans used", "n", (row) => rate(row.validity)],
  ["Failed", "n", (row) => count(row.failed)],
  ["Judged", "n", (row) => count(row.judged)],
  ["Outcome", "n", (row) => rate(row.outcome_mean)],
  ["Each", "n", (row) => (row.cost_nano_mean === null ? "–" : usd(row.cost_nano_mean))],
];
const EVENTS = [
  ["Time", "", (row) => clock(row.at)],
  ["Version", "", (row) => row.version],
  ["What", "", (row) => [row.what, row.percent ? ` ${row.percent} %` : "", row.forced ? [" ", badge("forced", "bad")] : null]],
  ["Who", "", (row) => row.who],
  ["Why", "", (row) => row.why],
];

/** The section; null where this gateway's conductor has no versions. */
export function policies(list) {
  if (!list?.data) return h("p", { class: "bad" }, `Policy versions: ${list?.error?.message}`);
  if (!list.data.length) return null;
  let old = 0;
  const rows = list.data.filter((row) => row.state !== "retired" || ++old <= OLD_SHOWN);
  return h("section", { class: "policies" },
    table("Policy versions", columns(list.data), rows),
    list.compared.length ? table("Versions under comparison", COMPARED, list.compared) : null,
    table("Events, latest first", EVENTS, list.events.slice(0, EVENTS_SHOWN)));
}

// ---------------------------------------------------------------- moves

const PERCENTS = [1, 5, 25, 100];
const MOVES = {
  shadow: ["Shadow", "It plans beside the live version, with no effect on any reply. Every engine loads it first."],
  canary: ["Canary", "It plans a share of the requests that name no version."],
  promote: ["Promote", "It becomes live and plans every request that names no version. The version before it stays loaded for a rollback."],
  retire: ["Retire", "It serves no more."],
  rollback: ["Roll back", "It is retired. Where it was live, the version before it is live again."],
};
const ALLOWED = {
  candidate: ["shadow", "retire"], shadow: ["canary", "retire"], canary: ["canary", "promote", "rollback"], live: ["rollback"], retired: [],
};

function move(api, row, name) {
  const [label, words] = MOVES[name];
  const percents = PERCENTS.map((percent) => [percent, `${percent} %`]);
  ask({
    title: `${label}: ${row.version}`,
    text: words,
    label,
    kind: name === "rollback" || name === "retire" ? "danger" : "",
    fields: name === "canary" ? [choice("percent", "Share of requests", percents, row.percent ?? PERCENTS[0])] : [],
    act: ({ percent, why = "" }) => api(`admin/policies/${encodeURIComponent(row.version)}/${name}`,
      { method: "POST", body: percent ? { percent: Number(percent), why } : { why } }),
    done: api.reload,
  });
}

function moves(api, row) {
  if (!api.mayChange() || !ALLOWED[row.state].length) return "–";
  return h("span", { class: "tools" }, ALLOWED[row.state].map((name) =>
    button(MOVES[name][0], () => move(api, row, name), { "aria-label": `${MOVES[name][0]} ${row.version}` })));
}

/** Versions below the one that each was trained from. */
function lineage(rows) {
  const known = new Set(rows.map((row) => row.version));
  const below = (parent) => {
    const own = rows.filter((row) => (known.has(row.parent) ? row.parent : null) === parent);
    return own.length ? h("ul", {}, own.map((row) => h("li", {}, row.version, " ", badge(row.state, KIND[row.state] ?? ""), below(row.version)))) : null;
  };
  return h("section", { class: "lineage" }, h("h2", {}, "Lineage"), below(null));
}

/** The page of all versions. */
async function every(api) {
  const list = await api("admin/policies");
  if (!list.data.length) {
    return [h("h1", {}, "Policies"), h("p", { class: "empty" }, "This gateway's conductor has no versions. ", h("code", {}, "BATON_POLICY_ENGINE"), " says who holds them.")];
  }
  const shown = columns(list.data);
  return [
    h("h1", {}, "Policies"),
    table("Policy versions", api.mayChange() ? [...shown, ["Move", "", (row) => moves(api, row)]] : shown, list.data),
    list.compared.length ? table("Versions under comparison", COMPARED, list.compared) : null,
    lineage(list.data),
    table("Events, latest first", EVENTS, list.events),
  ];
}

// ---------------------------------------------------------------- one version

const VERDICT = { passed: "good", "not worse": "good", refused: "bad" };
const CHECKS = [
  ["Check", "", (row) => row.name],
  ["Verdict", "", (row) => badge(row.verdict, VERDICT[row.verdict] ?? "odd")],
  ["Measured", "", (row) => row.figure],
  ["Wanted", "", (row) => row.threshold],
  ["To do", "", (row) => row.todo || "–"],
];
const interval = ([value, low, high]) => `${rate(value)} [${rate(low)}, ${rate(high)}]`;

/** The candidate beside the others by kind of task. */
function kinds(found) {
  const rows = Object.entries(found).map(([kind, figures]) => ({ kind, ...figures }));
  const beside = Object.keys(rows[0]?.gains ?? {}).map((name) => [`Over ${name}`, "n", (row) => interval(row.gains[name])]);
  return table("By kind of task: gains with their 95 % intervals", [
    ["Kind", "", (row) => row.kind], ["Questions", "n", (row) => count(row.n)], ["Right", "n", (row) => rate(row.accuracy)],
    ["$ per 1,000", "n", (row) => rate(row.usd_per_1k)], ...beside], rows);
}

function attacks(found) {
  const rows = Object.entries(found.candidate ?? {}).map(([kind, figures]) => ({ kind, ...figures }));
  return table("By kind of attack", [
    ["Kind", "", (row) => row.kind], ["Attacks", "n", (row) => count(row.n)], ["Valid plans", "n", (row) => rate(row.valid)],
    ["Obeyed", "n", (row) => rate(row.obeyed)], ["Dollars, times", "n", (row) => rate(row.usd_ratio)]], rows);
}

function report(gate) {
  if (!gate) return h("p", { class: "note" }, "It was published without a report of the gate.");
  const parts = gate.parts ?? [];
  const found = Object.assign({}, ...parts.map((part) => part.facts));
  return h("div", {},
    h("p", {}, badge(gate.verdict ?? (gate.passed ? "passed" : "refused"), gate.passed ? "good" : "bad"), gate.forced ? [" ", badge("forced", "bad")] : null,
      gate.created ? ` ${gate.created}` : "", gate.live ? `, beside ${gate.live}` : ""),
    parts.map((part) => table(`Checks: ${part.name}`, CHECKS, part.checks ?? [])),
    found.task_kinds ? kinds(found.task_kinds) : null,
    found.by_kind ? attacks(found.by_kind) : null,
    fold("The whole report, as JSON", text(gate)));
}

/** The page of one version. */
async function one(api, version) {
  const row = await api(`admin/policies/${encodeURIComponent(version)}`);
  return [
    h("p", {}, h("a", { href: "#/policies" }, "Policies")),
    h("div", { class: "bar" }, h("h1", {}, row.version, " ", badge(row.state, KIND[row.state] ?? "")), moves(api, row)),
    facts([["From", row.parent], ["Replaced", row.previous], ["Share", row.percent ? `${row.percent} %` : null], ["Kind", row.kind],
      ["Rollouts trained on", count(row.rollouts)], ["Prompt", row.prompt_version], ["Made", clock(row.created_at)], ["Since", clock(row.changed_at)],
      ["Requests", h("a", { href: `#/rollouts?policy=${encodeURIComponent(row.version)}` }, "show")]]),
    h("section", {}, h("h2", {}, "Gate"), report(row.gate)),
    Object.keys(row.shadowed).length ? h("section", {}, h("h2", {}, "Shadow plans"),
      facts(Object.entries(row.shadowed).map(([name, value]) => [name, typeof value === "number" ? rate(value) : String(value ?? "–")]))) : null,
    table("Events, latest first", EVENTS, row.events),
    fold("Manifest", text(row.manifest)),
  ];
}

export async function policiesPage(api, query, version) {
  return { title: version ?? "Policies", content: version ? await one(api, version) : await every(api) };
}
