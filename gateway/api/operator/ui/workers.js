// Workers: how they do now, what they cost, and how well they do each kind of task.

import { ask } from "./dialog.js";
import { badge, button, clock, count, h, ms, table, usd } from "./dom.js";

const WINDOWS = [[900, "15 min"], [3_600, "1 h"], [86_400, "24 h"]];
const FAILING_SHARE = 0.5;
const FAILING_CALLS_MIN = 5;

const share = (part, all) => (all ? `${((100 * part) / all).toFixed(1)} %` : "–");
const rate = (value) => (value === null ? "–" : value.toFixed(2));

const kindOfTask = (value) => value || "requests without a type";

function health(row) {
  if (row.quarantine) return badge("in quarantine", "bad", row.quarantine.why);
  if (row.rest?.state === "resting") return badge("resting", "bad", row.rest.why);
  if (row.rest) return badge("to be tried", "odd", row.rest.why);
  const { calls, errors } = row.recent;
  if (!calls) return badge("idle", "odd", "no calls in this time");
  if (calls >= FAILING_CALLS_MIN && errors / calls >= FAILING_SHARE) return badge("failing", "bad");
  return errors ? badge("some errors", "odd") : badge("well", "good");
}

/** Dollars per million tokens, in and out, as the pool file says. */
function price(row) {
  const { input_usd_per_mtok: input, output_usd_per_mtok: output } = row.price ?? {};
  return input === undefined ? "–" : `$${input} / $${output}`;
}

const COLUMNS = [
  ["Worker", "", (row) => h("a", { href: `#/rollouts?worker=${encodeURIComponent(row.name)}` }, row.name)],
  ["Health", "", health],
  ["Kind", "", (row) => row.kind],
  ["Model", "", (row) => row.model ?? "–"],
  ["Pools", "", (row) => row.pools.join(", ") || "none"],
  ["$ per M tokens, in / out", "n", price],
  ["Calls", "n", (row) => count(row.recent.calls)],
  ["Errors", "n", (row) => `${count(row.recent.errors)} (${share(row.recent.errors, row.recent.calls)})`],
  ["Retries", "n", (row) => count(row.recent.retries)],
  ["Spent", "n", (row) => usd(row.recent.cost_nano)],
  ["p50", "n", (row) => ms(row.recent.latency_p50_ms)],
  ["p95", "n", (row) => ms(row.recent.latency_p95_ms)],
];
const ERRORS = [
  ["Worker", "", (row) => row.worker],
  ["Error", "", (row) => row.error ?? "–"],
  ["Calls", "n", (row) => count(row.n)],
  ["Latest", "", (row) => clock(row.latest)],
];
const SUCCESS = [
  ["Worker", "", (row) => row.worker],
  ["Kind of task", "", (row) => row.task_type ?? "none"],
  ["Judged", "n", (row) => count(row.n)],
  ["Right", "n", (row) => rate(row.success)],
  ["Each", "n", (row) => usd(row.cost_nano)],
  ["Took", "n", (row) => ms(row.latency_ms)],
];
/** A share with its counts and its interval; unknown where there are too few. */
const errs = ({ k, n, low, high }) =>
  low === null ? `unknown (${n} judged)` : `${k} of ${n} (${Math.round(100 * low)} to ${Math.round(100 * high)} %)`;
const CHECKS = [
  ["Checker", "", (row) => row.checker],
  ["Wrong replies it accepted", "n", (row) => errs(row.false_accepts)],
  ["Right replies it rejected", "n", (row) => errs(row.false_rejects)],
  ["Accepted replies that were wrong", "n", (row) => errs(row.accepted_wrong)],
];
const SOURCES = [
  ["Source", "", (row) => row.source],
  ["Organisation", "", (row) => row.org],
  ["Compared", "n", (row) => count(row.n)],
  ["Agrees", "n", (row) => rate(row.agreement)],
  ["Accepts right replies", "n", (row) => rate(row.sensitivity)],
  ["Rejects wrong ones", "n", (row) => rate(row.specificity)],
  ["Its “right” weighs", "n", (row) => rate(row.weight_right)],
  ["Its “wrong” weighs", "n", (row) => rate(row.weight_wrong)],
];

const IDENTITIES = [
  ["Worker", "", (row) => row.worker],
  ["Version", "", (row) => row.version],
  ["Names the model", "", (row) => row.model || "the one it is asked for"],
  ["Fingerprint", "", (row) => row.fingerprint || "none"],
  ["First", "", (row) => clock(row.first_at)],
  ["Latest", "", (row) => clock(row.last_at)],
];
const RESTS = [
  ["Worker", "", (row) => row.name],
  ["Why", "", (row) => row.rest.why],
  ["Since", "", (row) => clock(row.rest.since)],
  ["Until", "", (row) => clock(row.rest.until)],
  ["Failures in a row", "n", (row) => count(row.rest.failures)],
];
const QUARANTINES = [
  ["Worker", "", (row) => row.worker],
  ["Since", "", (row) => clock(row.at)],
  ["By", "", (row) => row.by],
  ["Why", "", (row) => row.why || "–"],
  ["Tests", "", tests],
  ["Probes", "n", (row) => count(row.probes)],
  ["Probes cost", "n", (row) => usd(row.probes_nano)],
];
const FACTS = [
  ["Time", "", (row) => clock(row.at)],
  ["Worker", "", (row) => row.worker],
  ["Version", "", (row) => row.version],
  ["What", "", (row) => badge(row.what, { flagged: "bad", quarantined: "bad", released: "good" }[row.what] ?? "odd")],
  ["Details", "", (row) => told(row)],
];

function told({ what, data }) {
  if (what === "flagged") {
    return `${data.signal} on ${kindOfTask(data.task_type)}: at most ${rate(data.usual)}, now ${rate(data.now)}, after ${count(data.results)} results`;
  }
  if (what === "identity") return `${data.model || "the model it is asked for"}, fingerprint ${data.fingerprint || "none"}`;
  const probes = data.probes ? `; ${count(data.probes)} probes for ${usd(data.probes_nano)}` : "";
  return `${data.by}${data.why ? `: ${data.why}` : ""}${probes}`;
}

/** How far each flag's test has come. */
function tests(row) {
  const parts = row.flags.map((flag) => {
    const state = flag.passed ? "passed" : flag.probes ? `${rate(flag.bad)} bad of ${count(flag.probes)} probes` : "not probed";
    return `${flag.signal} on ${kindOfTask(flag.task_type)}: ${state}`;
  });
  return parts.join("; ") || "an operator lets it out";
}

/** The button that puts a worker into quarantine or lets it out, behind a dialog that asks why. */
function gate(api, row) {
  if (!api.mayChange() || !["openai", "litellm"].includes(row.kind)) return "–";
  const verb = row.quarantine ? "release" : "quarantine";
  const text = row.quarantine
    ? "It is planned with again, and compared with what it did before its flag: still worse, it is flagged again."
    : "It is kept out of plans on all gateways. Requests that name it, and requests that no other worker can serve, still go to it.";
  const act = (given) => api(`admin/workers/${encodeURIComponent(row.name)}/${verb}`, { method: "POST", body: given });
  const label = row.quarantine ? "Release" : "Quarantine";
  const open = () => ask({ title: `${label} worker ${row.name}`, text, label, act, done: api.reload });
  return button(label, open, { "aria-label": `${label} ${row.name}` });
}

export async function workers(api, query) {
  const windowS = Number(query.get("window_s")) || 3_600;
  const [list, drift] = await Promise.all([api(`admin/workers?window_s=${windowS}`), api("admin/drift")]);
  const held = new Map(drift.quarantines.map((one) => [one.worker, one]));
  for (const row of list.data) row.quarantine = held.get(row.name) ?? null;
  const resting = list.data.filter((row) => row.rest);
  const columns = [...COLUMNS, ["Quarantine", "", (row) => gate(api, row)]];
  const rule = drift.rule.signals.length ? `A flag of ${drift.rule.signals.join(", ")} puts a worker in quarantine.`
    : "No flag puts a worker in quarantine; operators do.";
  const windows = WINDOWS.map(([seconds, name]) =>
    h("a", { href: `#/workers?window_s=${seconds}`, "aria-current": seconds === windowS ? "true" : null }, name));
  const content = [
    h("div", { class: "bar" }, h("h1", {}, "Workers"), h("nav", { class: "switch", "aria-label": "Time" }, windows)),
    table("Workers of the pool file", columns, list.data),
    resting.length ? table("At rest: left alone, then tried", RESTS, resting) : h("p", { class: "note" }, "No worker rests."),
    drift.quarantines.length ? table("In quarantine", QUARANTINES, drift.quarantines) : h("p", { class: "note" }, `No worker is in quarantine. ${rule}`),
    drift.facts.length ? table("Drift: what happened to workers", FACTS, drift.facts)
      : h("p", { class: "note" }, "No worker was flagged, and none changed who it says it is."),
    list.errors.length ? table("Errors in this time", ERRORS, list.errors) : h("p", { class: "note" }, "No call failed in this time."),
    list.success.length ? table("Success by kind of task, of the latest judged steps", SUCCESS, list.success)
      : h("p", { class: "note" }, "No step was judged yet."),
    list.checks.length ? table("How often checkers err, by outcomes", CHECKS, list.checks) : null,
    list.checks.length ? h("p", { class: "note" }, "Counted at ", clock(list.checks_at), ".") : null,
    list.sources.length ? table("Who says what is right, and what it weighs", SOURCES, list.sources) : null,
    drift.identities.length ? table("Who the workers say they are", IDENTITIES, drift.identities) : null,
  ];
  return { title: "Workers", content };
}
