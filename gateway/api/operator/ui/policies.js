// Policy versions: their states, the comparison in progress, and the latest events.

import { badge, clock, count, h, table, usd } from "./dom.js";

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
    ["Version", "", (row) => row.version],
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
