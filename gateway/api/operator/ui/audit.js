// Every change: who made it, what it changed and why; and the check of the chain.

import { button, clock, count, field, fold, h, table, values } from "./dom.js";
import { text } from "./rollout.js";

const LIMIT = 100;
const FILTERS = [["actor", "Who", "key:… or local:…"], ["act", "What", "key.changed"], ["target", "Of", "key:… or org:…"]];

const COLUMNS = [
  ["Number", "n", (row) => row.seq],
  ["Time", "", (row) => clock(row.at)],
  ["Who", "", (row) => row.actor],
  ["What", "", (row) => row.act],
  ["Of", "", (row) => row.target],
  ["Why", "", (row) => row.why || "–"],
  ["Change", "", (row) => fold(Object.keys(row.after ?? row.before ?? {}).join(", ") || "none", text({ before: row.before, after: row.after }))],
];

/** The result of the check, in words. */
function verdict(report) {
  if (report.ok) return `The chain is whole: ${count(report.entries)} entries, confirmed outside the database up to number ${report.anchored}.`;
  return `The chain is broken: ${report.faults.map((fault) => `${fault.seq} ${fault.wrong}`).join(", ")}`;
}

export async function audit(api, query) {
  const page = await api(`admin/audit?limit=${LIMIT}&${query}`);
  const result = h("p", { role: "status", class: "note" });
  const verify = api.guard(async () => {
    result.textContent = "Checking…";
    result.textContent = verdict(await api("admin/audit/verify", { text: true }).then(JSON.parse));
  });
  const submit = (event) => {
    event.preventDefault();
    location.hash = `#/audit?${new URLSearchParams(values(event.currentTarget))}`;
  };
  const older = new URLSearchParams(query);
  older.set("before", page.data.at(-1)?.seq ?? "");
  const content = [
    h("h1", {}, "Audit"),
    h("form", { class: "filters", submit, "aria-label": "Filters" },
      FILTERS.map(([name, label, hint]) => field(name, label, { value: query.get(name), placeholder: hint })), h("button", { type: "submit" }, "Show")),
    h("div", { class: "bar" }, button("Check the chain", verify), result),
    page.data.length ? table("Changes, newest first", COLUMNS, page.data) : h("p", { class: "empty" }, "No change matches."),
    h("nav", { class: "bar", "aria-label": "Pages of the list" }, h("a", { href: "#/audit" }, "Newest"),
      page.data.length === LIMIT ? h("a", { href: `#/audit?${older}` }, "Older") : null),
  ];
  return { title: "Audit", content };
}
