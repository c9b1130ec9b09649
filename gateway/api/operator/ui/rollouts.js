// The search of requests, newest first: filters, live tail, export, and two to compare.

import { badges, clock, count, h, ms, option, table, usd } from "./dom.js";
import { empty } from "./overview.js";

const STATUSES = ["done", "failed", "aborted", "fallback", "capped"];
const TAIL_MS = 2_000;
const COMPARED = 2;
// [name, label, hint] of filters that are a line of text; the first ones are always shown
const MORE = [
  ["worker", "Worker", "answered a step"], ["fault", "Cap or fault", "steps, conductor_slow, …"],
  ["user", "End user", "any"], ["tag", "Metadata", "name or name:value"],
  ["cost_min_usd", "Cost from, $", "0.01"], ["cost_max_usd", "Cost to, $", "1"],
  ["outcome_min", "Outcome from", "0"], ["outcome_max", "Outcome to", "1"],
];
const NAMES = ["key", "policy", "status", "text", "outcome", "since", "until", ...MORE.map(([name]) => name)];

function line(query, name, label, hint, type = "text") {
  return h("label", {}, label, h("input", { name, value: query.get(name), placeholder: hint, type, spellcheck: "false", autocomplete: "off" }));
}

/** A time of the query in the form of an input of local time. */
function local(iso) {
  const at = iso ? new Date(iso) : null;
  return at && !Number.isNaN(at.getTime()) ? `${at.toLocaleDateString("sv")}T${at.toLocaleTimeString("sv").slice(0, 5)}` : "";
}

function time(query, name, label) {
  return h("label", {}, label, h("input", { name, value: local(query.get(name)), type: "datetime-local" }));
}

function choice(query, name, label, values) {
  return h("label", {}, label, h("select", { name }, option("", "any", query.get(name) ?? ""),
    values.map(([value, text]) => option(value, text, query.get(name)))));
}

function given(form) {
  const pairs = [...new FormData(form)].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value);
  return pairs.map(([name, value]) => [name, ["since", "until"].includes(name) ? new Date(value).toISOString() : value]);
}

function filters(query, keys) {
  const known = keys.filter((key) => key.class === "data").map((key) => [key.id, key.name]);
  if (query.get("key") && !known.some(([id]) => id === query.get("key"))) known.push([query.get("key"), query.get("key")]);
  const submit = (event) => {
    event.preventDefault();
    location.hash = `#/rollouts?${new URLSearchParams(given(event.currentTarget))}`;
  };
  const rest = [...MORE.map(([name]) => name), "outcome", "since", "until"];
  return h("form", { class: "filters", submit, "aria-label": "Search" },
    choice(query, "key", "Key", known),
    h("label", {}, "Policy", h("input", { name: "policy", value: query.get("policy"), placeholder: "any", list: "policies", spellcheck: "false" })),
    h("datalist", { id: "policies" }, ["baton", "baton/conductor", "baton/rule", "conductor", "rule"].map((name) => option(name))),
    choice(query, "status", "Status", STATUSES.map((name) => [name, name])),
    line(query, "text", "Text", "in question or reply", "search"),
    h("button", { type: "submit" }, "Show"),
    h("details", { open: rest.some((name) => query.get(name)) }, h("summary", {}, "More filters"),
      h("div", { class: "filters" },
        MORE.map(([name, label, hint]) => line(query, name, label, hint)),
        choice(query, "outcome", "Outcome", [["any", "has one"], ["none", "has none"]]),
        time(query, "since", "Since"), time(query, "until", "Until"))));
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

/** The list with a box on each row; `chosen` are the ids of the rows to compare, and survive a redraw. */
function list(rows, chosen, compare) {
  const change = (event) => {
    const { value, checked } = event.currentTarget;
    if (checked) chosen.add(value);
    else chosen.delete(value);
    compare.disabled = chosen.size !== COMPARED;
  };
  const box = ["Compare", "pick", (row) => h("input", {
    type: "checkbox", value: row.id, checked: chosen.has(row.id), "aria-label": `compare ${row.id.slice(0, 8)} of ${row.created_at}`, change })];
  return h("div", { class: "cards" }, table("Newest first", [...COLUMNS, box], rows));
}

function none(query) {
  return NAMES.some((name) => query.get(name)) || query.get("before")
    ? h("p", { class: "empty" }, "No request matches. ", h("a", { href: "#/rollouts" }, "Show all"))
    : empty("No requests yet.");
}

/** Where the search of this page ended before it was full. */
function scanned(page) {
  return page.scanned_to
    ? h("p", { class: "note" }, "This page looked at as many requests as one may, back to ", clock(page.scanned_to), ". “Older” goes on.") : null;
}

/** A box that loads the list again every TAIL_MS while it is checked and the page is shown. */
function tail(refresh) {
  const follow = async (box) => {
    if (!box.isConnected || !box.checked) return;
    if (!document.hidden) await refresh();
    setTimeout(() => follow(box), TAIL_MS);
  };
  return h("label", { class: "inline" }, h("input", { type: "checkbox", name: "tail", change: (event) => follow(event.currentTarget) }), "Live");
}

async function save(api, query) {
  const text = await api(`admin/rollouts/export?${query}`, { text: true });
  const url = URL.createObjectURL(new Blob([text], { type: "application/x-ndjson" }));
  h("a", { href: url, download: "rollouts.jsonl" }).click();
  URL.revokeObjectURL(url);
}

export async function rollouts(api, query) {
  const path = `admin/rollouts?${query}`;
  const [page, keys] = await Promise.all([
    api(path),
    api("admin/keys").catch((error) => (error.status === 503 ? { data: [] } : Promise.reject(error))),
  ]);
  const linked = (before) => {
    const other = new URLSearchParams(query);
    if (before) other.set("before", before);
    else other.delete("before");
    return `#/rollouts?${other}`;
  };
  const chosen = new Set();
  const compare = h("button", { type: "button", disabled: true, click: () => (location.hash = `#/compare/${[...chosen].join("/")}`) }, "Compare two");
  const draw = (shown) => (shown.data.length ? list(shown.data, chosen, compare) : none(query));
  const place = h("div", { class: "list" }, draw(page));
  const news = h("p", { class: "note", role: "status" });
  let first = page.data[0]?.id;
  const refresh = api.guard(async () => {
    const latest = await api(path);
    if (latest.data[0]?.id === first) return;
    const known = latest.data.findIndex((row) => row.id === first);
    news.textContent = `${known < 0 ? `${latest.data.length} or more` : known} new`;
    first = latest.data[0]?.id;
    const focus = document.activeElement?.value;
    place.replaceChildren(draw(latest));
    if (focus && chosen.has(focus)) place.querySelector(`input[value="${CSS.escape(focus)}"]`)?.focus();
  });
  const content = [
    h("h1", {}, "Rollouts"),
    filters(query, keys.data),
    h("div", { class: "bar" },
      h("span", { class: "tools" }, query.get("before") ? null : tail(refresh), news),
      h("span", { class: "tools" }, compare,
        api.mayChange() ? h("a", { href: `#/jobs?new=1&${query}` }, "Train on these") : null, h("button", { type: "button", click: api.guard(() => save(api, query)) }, "Export JSONL"))),
    place, scanned(page),
    h("nav", { class: "bar", "aria-label": "Pages of the list" },
      query.get("before") ? h("a", { href: linked(null) }, "Newest") : h("span"),
      page.next ? h("a", { href: linked(page.next) }, "Older") : null),
  ];
  return { title: "Rollouts", content };
}
