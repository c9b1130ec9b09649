// Money: dollars by day, key and worker; open holds and uncertain charges; keys with their limits; credits.

import { ask, tell } from "./dialog.js";
import { badge, button, choice, clock, count, field, h, picture, s, table, usd, values } from "./dom.js";
import { organisations } from "./orgs.js";

const DAYS = [[7, "7 days"], [30, "30 days"], [90, "90 days"]];
const CHART_PX = 140;
const SEARCHED_FROM = 20; // keys, from which on there is a field to search them
const NANO = 1e9;

const dollars = (value) => (value === null || value === undefined ? "–" : usd(Number(value) * NANO));
const limit = (value) => (value === null ? "–" : String(value));

// ---------------------------------------------------------------- spending

/** Days from the first to the last of a report, in UTC. */
function daysOf(since, until) {
  const days = [];
  for (let at = Date.parse(`${since.slice(0, 10)}T00:00:00Z`); at <= Date.parse(until); at += 86_400_000) days.push(new Date(at).toISOString().slice(0, 10));
  return days;
}

function total(rows, name) {
  const sums = new Map();
  for (const row of rows) {
    const sum = sums.get(row[name]) ?? { ...row, count: 0, cost_nano: 0 };
    sum.count += row.requests ?? row.calls;
    sum.cost_nano += row.cost_nano;
    sums.set(row[name], sum);
  }
  return [...sums.values()].sort((a, b) => b.cost_nano - a.cost_nano);
}

function chart(report) {
  const days = daysOf(report.since, report.until), spent = new Map();
  for (const row of report.by_key) spent.set(row.day, (spent.get(row.day) ?? 0) + row.cost_nano);
  const top = Math.max(...spent.values(), 0) || 1;
  const draw = (width) => {
    const step = width / days.length, floor = CHART_PX - 18;
    return [
      s("line", { class: "axis", x1: 0, x2: width, y1: floor + 0.5, y2: floor + 0.5 }),
      s("text", { x: 0, y: 11 }, `${usd(top)} at most`), s("text", { x: 0, y: CHART_PX - 4 }, days[0]),
      s("text", { x: width, y: CHART_PX - 4, "text-anchor": "end" }, days.at(-1)),
      days.map((day, i) => {
        const high = ((spent.get(day) ?? 0) / top) * (floor - 16);
        return s("g", {}, s("title", {}, `${day}: ${usd(spent.get(day) ?? 0)}`),
          s("rect", { class: "money", x: i * step + 0.5, y: floor - high, width: Math.max(step - 1, 1), height: high }));
      }),
    ];
  };
  const label = `Dollars a day over ${days.length} days; the highest is ${usd(top)}`;
  return h("figure", {}, h("figcaption", {}, "Dollars a day (UTC)"), picture(CHART_PX, label, draw));
}

const BY_KEY = [
  ["Key", "", (row) => h("a", { href: `#/rollouts?key=${encodeURIComponent(row.key_id)}` }, row.key_name ?? row.key_id)],
  ["Requests", "n", (row) => count(row.count)],
  ["Spent", "n", (row) => usd(row.cost_nano)],
];
const BY_WORKER = [
  ["Worker", "", (row) => row.worker],
  ["Calls", "n", (row) => count(row.count)],
  ["Spent", "n", (row) => usd(row.cost_nano)],
];

// ---------------------------------------------------------------- holds, charges, credits

const of = (row) => (row.rollout_id ? h("a", { href: `#/rollouts/${row.rollout_id}` }, row.rollout_id.slice(0, 18)) : row.hold_id ?? row.charge);
const HOLDS = [
  ["Request", "", of],
  ["Since", "", (row) => clock(row.at)],
  ["Held", "n", (row) => usd(row.amount_nano)],
  ["In", "", (row) => row.scopes.join(", ")],
];

function giveBack(api, row) {
  if (Number(row.left_usd) === 0) return badge("given back", "good");
  if (!api.mayChange()) return "–";
  const left = dollars(row.left_usd);
  return button(`Give back ${left}`, () => ask({
    title: "Give a charge back",
    text: `${left} of ${row.rollout_id ?? row.charge} go back to ${row.scopes.join(", ")}.`,
    label: "Give back",
    act: ({ why = "" }) => api(`admin/uncertain/${encodeURIComponent(row.charge)}/credit`, { method: "POST", body: { why } }),
    done: api.reload,
  }));
}

function uncertainColumns(api) {
  return [HOLDS[0], HOLDS[1], ["Charged", "n", (row) => dollars(row.usd)], HOLDS[3], ["Credit", "", (row) => giveBack(api, row)]];
}

const CREDITS = [
  ["Time", "", (row) => clock(row.at)],
  ["Amount", "n", (row) => dollars(row.usd)],
  ["Charge", "", (row) => row.charge ?? "top-up"],
  ["In", "", (row) => row.scopes.join(", ")],
  ["By", "", (row) => row.by],
  ["Why", "", (row) => row.why || "–"],
];

// ---------------------------------------------------------------- keys

const LIMITS = [
  ["budget_usd", "Dollars in all"], ["budget_month_usd", "Dollars a month"], ["budget_day_usd", "Dollars a day"],
  ["rpm", "Requests a minute"], ["tpm", "Tokens a minute"], ["concurrency", "Requests at once"],
];
const WHOLE = ["rpm", "tpm", "concurrency"];
const CLASSES = [["data", "data: sends requests"], ["admin", "admin: this console"]];
const ROLES = [["auditor", "auditor: reads only"], ["operator", "operator: all but admin keys"], ["admin", "admin"]];

function limitFields(key) {
  return LIMITS.map(([name, label]) => field(name, `${label} (empty: no limit)`, { value: key?.[name] ?? "", inputmode: "decimal" }));
}

/** The limits of a form; an empty field is no limit. */
function limitsOf(given) {
  return Object.fromEntries(LIMITS.map(([name]) => [name, given[name] === undefined ? null : WHOLE.includes(name) ? Number(given[name]) : given[name]]));
}

function create(api) {
  const classes = api.role === "admin" ? CLASSES : CLASSES.slice(0, 1);
  let made;
  ask({
    title: "Create a key",
    label: "Create",
    fields: [field("name", "Name", { required: true, maxlength: 128 }), choice("key_class", "Class", classes, "data"),
      api.role === "admin" ? choice("role", "Role (of an admin key)", ROLES, "auditor") : null, field("org", "Organisation", { value: "default" }), limitFields()],
    act: async ({ name, key_class, role, org, why = "", ...given }) => {
      const own = key_class === "admin" ? { role } : {};
      made = await api("admin/keys", { method: "POST", body: { name, key_class, org, why, ...own, ...limitsOf(given) } });
    },
    done: async () => {
      await api.reload();
      tell({ title: `Key ${made.id}`, text: "Its secret is shown this once. Store it now.", secret: made.key });
    },
  });
}

function change(api, key) {
  ask({
    title: `Limits of ${key.name}`,
    text: "They count within a second.",
    label: "Set limits",
    fields: limitFields(key),
    act: ({ why = "", ...given }) => api(`admin/keys/${key.id}`, { method: "PATCH", body: { why, ...limitsOf(given) } }),
    done: api.reload,
  });
}

function revoke(api, key) {
  ask({
    title: `Revoke ${key.name}`,
    text: `Key ${key.id} stops working within a second, for good.`,
    label: "Revoke",
    kind: "danger",
    act: ({ why = "" }) => api(`admin/keys/${key.id}?${new URLSearchParams({ why })}`, { method: "DELETE" }),
    done: api.reload,
  });
}

function manage(api, key) {
  const may = api.role === "admin" || (api.role === "operator" && key.class === "data");
  if (!may || key.revoked_at) return "–";
  return h("span", { class: "tools" },
    button("Limits", () => change(api, key), { "aria-label": `Limits of ${key.name}` }),
    button("Revoke", () => revoke(api, key), { "aria-label": `Revoke ${key.name}` }));
}

function keyColumns(api) {
  return [
    ["Key", "", (row) => [row.name, row.revoked_at ? [" ", badge("revoked", "bad")] : null]],
    ["Id", "", (row) => h("code", {}, row.id)],
    ["Class", "", (row) => (row.class === "admin" ? `admin: ${row.role}` : row.class)],
    ["Organisation", "", (row) => row.org],
    ["Spent", "n", (row) => dollars(row.spent_usd)],
    ["Held", "n", (row) => dollars(row.held_usd)],
    ["Budget", "n", (row) => dollars(row.budget_usd)],
    ["A month", "n", (row) => dollars(row.budget_month_usd)],
    ["A day", "n", (row) => dollars(row.budget_day_usd)],
    ["Requests a minute", "n", (row) => limit(row.rpm)],
    ...(api.mayChange() ? [["Change", "", (row) => manage(api, row)]] : []),
  ];
}

/** Keys by page, and by a part of their id, name or organisation. */
function keys(api, page, query) {
  const linked = (changes) => {
    const other = new URLSearchParams(query);
    for (const [name, value] of Object.entries(changes)) value ? other.set(name, value) : other.delete(name);
    return `#/money?${other}`;
  };
  const submit = (event) => {
    event.preventDefault();
    location.hash = linked({ q: values(event.currentTarget).q, before: null });
  };
  const searched = query.get("q") || query.get("before");
  const search = searched || page.next || page.data.length > SEARCHED_FROM;
  return [
    h("div", { class: "bar" }, h("h2", {}, "Keys"), api.mayChange() ? button("Create a key", () => create(api)) : null),
    search
      ? h("form", { class: "filters", submit, "aria-label": "Search of keys" },
        field("q", "Id, name or organisation", { value: query.get("q") }), h("button", { type: "submit" }, "Search")) : null,
    page.data.length ? table("Keys with their limits", keyColumns(api), page.data) : h("p", { class: "empty" }, "No key matches."),
    searched || page.next
      ? h("nav", { class: "bar", "aria-label": "Pages of keys" },
        searched ? h("a", { href: linked({ q: null, before: null }) }, "All keys") : h("span"),
        page.next ? h("a", { href: linked({ before: page.next }) }, "Older keys") : null) : null,
  ];
}

export async function money(api, query) {
  const asked = new URLSearchParams(["q", "before"].filter((name) => query.get(name)).map((name) => [name, query.get(name)]));
  const days = Number(query.get("days")) || 30;
  const [report, holds, uncertain, page, credits, orgs] = await Promise.all([
    api(`admin/spend?days=${days}`), api("admin/holds"), api("admin/uncertain"),
    api(`admin/keys?${asked}`), api("admin/credits"), api("admin/orgs"),
  ]);
  const windows = DAYS.map(([n, name]) => h("a", { href: `#/money?days=${n}`, "aria-current": n === days ? "true" : null }, name));
  const content = [
    h("div", { class: "bar" }, h("h1", {}, "Money"), h("nav", { class: "switch", "aria-label": "Time" }, windows)),
    chart(report),
    report.truncated ? h("p", { class: "note" }, "Sums are over the latest requests only; there were more in this time.") : null,
    h("div", { class: "pair" }, table("By key", BY_KEY, total(report.by_key, "key_id")), table("By worker", BY_WORKER, total(report.by_worker, "worker"))),
    ...keys(api, page, query),
    h("h2", {}, "Holds and charges"),
    holds.data.length ? table("Open holds, newest first", HOLDS, holds.data) : h("p", { class: "note" }, "No hold is open."),
    uncertain.data.length ? table("Uncertain charges, newest first", uncertainColumns(api), uncertain.data)
      : h("p", { class: "note" }, "No charge is uncertain."),
    credits.data.length ? table("Credits, newest first", CREDITS, credits.data) : h("p", { class: "note" }, "No credit was given."),
    organisations(orgs, { data: [] }),
  ];
  return { title: "Money", content };
}
