// Requests, newest first: key, workers, cost.

import { badges, clock, count, h, ms, table, usd } from "./dom.js";
import { empty } from "./overview.js";

const STATUSES = ["done", "failed", "aborted", "fallback", "capped"];

function option(value, text, chosen) {
  return h("option", { value, selected: value === chosen }, text);
}

function filters(query, keys) {
  const chosen = (name) => query.get(name) ?? "";
  const known = keys.filter((key) => key.class === "data").map((key) => option(key.id, key.name, chosen("key")));
  if (chosen("key") && !keys.some((key) => key.id === chosen("key"))) known.push(option(chosen("key"), chosen("key"), chosen("key")));
  const change = (event) => {
    event.preventDefault();
    const given = [...new FormData(event.currentTarget)].filter(([, value]) => value.trim());
    location.hash = `#/rollouts?${new URLSearchParams(given)}`;
  };
  return h("form", { class: "filters", submit: change, change },
    h("label", {}, "Key", h("select", { name: "key" }, option("", "any", chosen("key")), known)),
    h("label", {}, "Policy", h("input", { name: "policy", value: chosen("policy"), placeholder: "any", list: "policies", spellcheck: "false" })),
    h("datalist", { id: "policies" }, ["baton", "baton/conductor", "baton/rule", "conductor", "rule"].map((name) => option(name))),
    h("label", {}, "Status", h("select", { name: "status" }, option("", "any", chosen("status")),
      STATUSES.map((name) => option(name, name, chosen("status"))))),
    h("button", { type: "submit" }, "Show"));
}

/** Workers in order, each with the number of its calls. */
function calls(workers) {
  const times = new Map();
  for (const worker of workers) times.set(worker, (times.get(worker) ?? 0) + 1);
  return [...times].map(([worker, n]) => (n > 1 ? `${worker} ×${n}` : worker)).join(", ") || "none";
}

const COLUMNS = [
  ["Time", "", (row) => h("a", { class: "row", href: `#/rollouts/${row.id}` }, clock(row.created_at))],
  ["Key", "", (row) => row.key_name ?? row.key_id],
  ["Asked for", "", (row) => row.policy_requested],
  ["Planned by", "", (row) => row.policy_version ?? row.policy_used],
  ["Answered by", "", (row) => calls(row.workers)],
  ["Steps", "n", (row) => count(row.workers.length)],
  ["Cost", "n", (row) => usd(row.cost_nano)],
  ["Latency", "n", (row) => ms(row.latency_ms)],
  ["Status", "", badges],
];

export async function rollouts(api, query) {
  const [page, keys] = await Promise.all([
    api(`admin/rollouts?${query}`),
    api("admin/keys").catch((error) => (error.status === 503 ? { data: [] } : Promise.reject(error))),
  ]);
  const older = new URLSearchParams(query);
  older.set("before", page.next ?? "");
  const newest = new URLSearchParams(query);
  newest.delete("before");
  const filtered = ["key", "policy", "status"].some((name) => query.get(name));
  const none = filtered || query.get("before")
    ? h("p", { class: "empty" }, "No request matches. ", h("a", { href: "#/rollouts" }, "Show all"))
    : empty("No requests yet.");
  const content = [
    h("h1", {}, "Rollouts"),
    filters(query, keys.data),
    page.data.length ? h("div", { class: "cards" }, table("Newest first", COLUMNS, page.data)) : none,
    h("nav", { class: "bar", "aria-label": "Pages of the list" },
      query.get("before") ? h("a", { href: `#/rollouts?${newest}` }, "Newest") : h("span"),
      page.next ? h("a", { href: `#/rollouts?${older}` }, "Older") : null),
  ];
  return { title: "Rollouts", content };
}
