// Requests, dollars and errors of the last minutes or hours, in all and by policy, worker and key.

import { clock, count, h, ms, picture, s, table, usd } from "./dom.js";
import { jobs, JOBS_SHOWN } from "./jobs.js";
import { AUDIT, organisations } from "./orgs.js";
import { policies } from "./policies.js";

const WINDOWS = [[900, "15 min"], [3_600, "1 h"], [86_400, "24 h"]];
const BUCKETS = 60;
const KEYS_SHOWN_MAX = 12;
const CHART_PX = 120;
const HASH_SHOWN = 12;
const CURL = `facts() { python3 -c "import json; print(json.load(open('.baton/serve.json'))['$1'])"; }
curl -s "$(facts base_url)/chat/completions" \\
  -H "authorization: Bearer $(facts data_key)" \\
  -H 'content-type: application/json' \\
  -d '{"model": "baton", "messages": [{"role": "user", "content": "How many grams are there in 51 kilograms?"}]}'`;

/** Instructions for a log without requests. */
export function empty(text) {
  return h("section", { class: "empty" }, h("p", {}, text),
    h("p", {}, "Send one, where ", h("code", {}, "baton serve"), " was started:"), h("pre", { tabindex: 0 }, CURL));
}

function tile(title, value, note, kind) {
  return h("div", { class: `tile ${kind ?? ""}` }, h("dt", {}, title), h("dd", {}, value), h("dd", { class: "note" }, note));
}

function tiles(t) {
  const share = (n) => (t.requests ? `${((100 * n) / t.requests).toFixed(1)} %` : "–");
  const each = t.requests ? `${usd(t.cost_nano / t.requests)} each` : "–";
  return h("dl", { class: "tiles" },
    tile("Requests", count(t.requests), t.aborted ? `${count(t.aborted)} left by the client` : "answered or refused"),
    tile("Spent", usd(t.cost_nano), each),
    tile("Errors", count(t.errors), share(t.errors), t.errors ? "bad" : ""),
    tile("Fallbacks", count(t.fallbacks), t.capped ? `${count(t.capped)} capped` : share(t.fallbacks), t.fallbacks ? "odd" : ""),
    tile("Latency", ms(t.latency_p50_ms), `p95 ${ms(t.latency_p95_ms)}`),
    tile("Overhead", ms(t.overhead_p50_ms), `p95 ${ms(t.overhead_p95_ms)}`));
}

/** Bars over time; `parts` are [class, value of a bucket], stacked from the bottom. */
function chart(title, series, windowS, parts, written) {
  const top = Math.max(...series.map((b) => parts.reduce((sum, [, value]) => sum + value(b), 0)), 0) || 1;
  const label = `${title}, ${windowS / 60} minutes in ${BUCKETS} parts; the highest is ${written(top)}`;
  const draw = (width) => {
    const floor = CHART_PX - 18, ceiling = 16, step = width / BUCKETS;
    const bars = series.map((b) => {
      let y = floor;
      const drawn = parts.map(([kind, value]) => {
        const high = (value(b) / top) * (floor - ceiling);
        y -= high;
        return s("rect", { class: kind, x: b.bucket * step + 0.5, y, width: Math.max(step - 1, 1), height: high });
      });
      const label = parts.map(([kind, value]) => `${kind} ${written(value(b))}`).join(", ");
      return s("g", {}, s("title", {}, label), drawn);
    });
    const ago = WINDOWS.find(([seconds]) => seconds === windowS)?.[1] ?? `${windowS} s`;
    return [
      s("line", { class: "axis", x1: 0, x2: width, y1: floor + 0.5, y2: floor + 0.5 }),
      s("text", { x: 0, y: 11 }, `${written(top)} at most`),
      s("text", { x: 0, y: CHART_PX - 4 }, `${ago} ago`),
      s("text", { x: width, y: CHART_PX - 4, "text-anchor": "end" }, "now"),
      bars,
    ];
  };
  return h("figure", {}, h("figcaption", {}, title), picture(CHART_PX, label, draw));
}

function spending(keys, older) {
  const live = keys.filter((key) => key.class === "data" && !key.revoked_at);
  const share = (key) => (key.budget_usd === null ? -1 : (Number(key.spent_usd) + Number(key.held_usd)) / (Number(key.budget_usd) || 1));
  live.sort((a, b) => share(b) - share(a) || Number(b.spent_usd) - Number(a.spent_usd));
  const rows = live.slice(0, KEYS_SHOWN_MAX).map((key) => {
    const [spent, held] = [key.spent_usd, key.held_usd].map((dollars) => Number(dollars) * 1e9);
    const limit = key.budget_usd === null ? null : Number(key.budget_usd) * 1e9;
    const text = `${usd(spent)} ${limit === null ? "spent, no budget" : `of ${usd(limit)}`}${held ? `, ${usd(held)} held` : ""}`;
    return h("li", {},
      h("a", { href: `#/rollouts?key=${encodeURIComponent(key.id)}` }, key.name), h("span", { class: "amount" }, text),
      limit === null ? null : bar(spent / (limit || 1), held / (limit || 1)));
  });
  const more = live.length - rows.length;
  return h("section", {}, h("h2", {}, "Spend against budget"),
    h("ul", { class: "budgets" }, rows), more > 0 ? h("p", { class: "note" }, `and ${count(more)} keys more${older ? ", and older ones" : ""}`) : null);
}

function bar(spent, held) {
  const full = Math.min(spent, 1);
  const draw = (width) => [
    s("rect", { class: "track", x: 0, y: 0, width, height: 8, rx: 4 }),
    s("rect", { class: spent + held >= 0.9 ? "failed" : "ok", x: 0, y: 0, width: Math.max(full * width, spent ? 2 : 0), height: 8, rx: 4 }),
    s("rect", { class: "held", x: full * width, y: 0, width: Math.min(held, 1 - full) * width, height: 8 }),
  ];
  return picture(8, `${Math.round(100 * (spent + held))} % of the budget`, draw);
}

function readiness(health, pool) {
  const parts = Object.entries(health.parts).map(([name, state]) =>
    h("li", { class: state === "ok" ? "good" : "bad" }, `${name}: ${state}`));
  return h("ul", { class: "ready", "aria-label": "Readiness" },
    h("li", { class: health.status === "ready" ? "good" : "bad" }, health.status), parts,
    h("li", { title: pool.hash }, `pool ${pool.hash.slice(0, HASH_SHOWN)} since `, clock(pool.loaded_at)));
}

/** Who plans in the default pool and in those with outcomes, and the next rung. */
function planners(standings) {
  const shown = standings.filter((each, at) => at === 0 || each.outcomes);
  return h("ul", { class: "planners", "aria-label": "Who plans" }, shown.map((each) =>
    h("li", {}, shown.length > 1 ? h("strong", {}, `${each.pool} `) : null, each.line)));
}

const money = ["Spent", "n", (row) => usd(row.cost_nano)];
const errors = ["Errors", "n", (row) => h("span", { class: row.errors ? "bad" : "" }, count(row.errors))];
const latency = [["p50", "n", (row) => ms(row.latency_p50_ms)], ["p95", "n", (row) => ms(row.latency_p95_ms)]];
const REQUESTS = [
  ["Requests", "n", (row) => count(row.requests)],
  errors,
  ["Fallbacks", "n", (row) => count(row.fallbacks)],
  money,
  ...latency,
  ["Overhead p50", "n", (row) => ms(row.overhead_p50_ms)],
  ["p95", "n", (row) => ms(row.overhead_p95_ms)],
];
const CALLS = [
  ["Calls", "n", (row) => count(row.calls)],
  errors,
  ["Retries", "n", (row) => count(row.retries)],
  money,
  ["Tokens", "n", (row) => count(row.tokens)],
  ...latency,
];
const filtered = (name, value, text) => h("a", { href: `#/rollouts?${name}=${encodeURIComponent(value)}` }, text);

function body(data, windowS, balances) {
  if (!data.totals.requests) return [empty("No requests in this time."), balances];
  const cut = data.truncated ? h("p", { class: "note" }, `Sums are over the latest ${count(data.totals.requests)} requests.`) : null;
  return [
    tiles(data.totals), cut,
    h("div", { class: "charts" },
      chart("Requests", data.series, windowS, [["ok", (b) => b.requests - b.errors], ["failed", (b) => b.errors]], count),
      chart("Latency p95", data.series, windowS, [["plan", (b) => b.latency_p95_ms ?? 0]], ms),
      chart("Dollars", data.series, windowS, [["money", (b) => b.cost_nano]], usd)),
    balances,
    table("By policy", [["Policy", "", (row) => filtered("policy", row.policy, row.policy)], ...REQUESTS], data.by_policy),
    table("By worker", [["Worker", "", (row) => row.worker], ...CALLS], data.by_worker),
    table("By key", [["Key", "", (row) => filtered("key", row.key_id, row.key_name ?? row.key_id)], ...REQUESTS], data.by_key),
  ];
}

/** The page. Balances come from Redis: while it is away, the page shows the rest. */
export async function overview(api, query) {
  const windowS = Number(query.get("window_s")) || 3_600;
  const [data, health, keys, versions, work, orgs, entries, pool] = await Promise.all([
    api(`admin/overview?window_s=${windowS}`),
    api("readyz", { accept: [503] }),
    api("admin/keys").catch((error) => (error.status === 503 ? { away: error.message } : Promise.reject(error))),
    api("admin/policies", { accept: [503] }),
    api(`admin/jobs?limit=${JOBS_SHOWN}`, { accept: [503] }),
    api("admin/orgs", { accept: [503] }),
    api(AUDIT, { accept: [503] }),
    api("admin/pools"),
  ]);
  const windows = WINDOWS.map(([seconds, name]) =>
    h("a", { href: `#/?window_s=${seconds}`, "aria-current": seconds === windowS ? "true" : null }, name));
  const content = [
    h("div", { class: "bar" }, h("h1", {}, "Overview"), h("nav", { class: "switch", "aria-label": "Time" }, windows)),
    planners(data.planners),
    readiness(health, pool),
    policies(versions),
    jobs(work),
    ...body(data, windowS, keys.away ? h("p", { class: "bad" }, `Balances: ${keys.away}`) : spending(keys.data, Boolean(keys.next))),
    organisations(orgs, entries),
  ];
  return { title: "Overview", content };
}
