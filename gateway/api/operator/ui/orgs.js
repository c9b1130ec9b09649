// Organisations with their budgets, and the latest changes.

import { badge, clock, h, table } from "./dom.js";

export const AUDIT = "admin/audit?limit=8";
const SHOWN_CHARS = 80;

const dollars = (value) => (value === null ? "–" : `$${value}`);
const number = (value) => (value === null ? "–" : String(value));

const COLUMNS = [
  ["Organisation", "", (row) => [row.name, row.closed_at ? [" ", badge("closed", "bad")] : null]],
  ["In all", "n", (row) => dollars(row.budget_usd)],
  ["A month", "n", (row) => dollars(row.budget_month_usd)],
  ["A day", "n", (row) => dollars(row.budget_day_usd)],
  ["Each user a day", "n", (row) => dollars(row.user_budget_day_usd)],
  ["Requests a minute", "n", (row) => number(row.rpm)],
  ["Retention, days", "n", (row) => number(row.retention_days)],
];

/** A change in one short line: names and new values. */
function changed(row) {
  const pairs = Object.entries(row.after ?? {}).map(([name, value]) => `${name}: ${JSON.stringify(value)}`);
  const line = row.before === null ? "" : pairs.join(", ");
  return line.length > SHOWN_CHARS ? `${line.slice(0, SHOWN_CHARS)}…` : line;
}

const ENTRIES = [
  ["Time", "", (row) => clock(row.at)],
  ["Who", "", (row) => row.actor],
  ["What", "", (row) => row.act],
  ["Of", "", (row) => row.target],
  ["To", "", changed],
  ["Why", "", (row) => row.why],
];

/** The section; the reason where a table could not be read. */
export function organisations(orgs, entries) {
  const away = [orgs, entries].find((reply) => !reply?.data);
  if (away !== undefined) return h("p", { class: "bad" }, `Organisations and audit: ${away?.error?.message}`);
  return h("section", { class: "organisations" },
    table("Organisations, and what all of their keys may spend", COLUMNS, orgs.data),
    entries.data.length ? table("Changes, latest first", ENTRIES, entries.data) : null);
}
