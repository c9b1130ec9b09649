// Training jobs: stage, progress and result of each; one with its curve and its log; submit, cancel, resume.

import { ask } from "./dialog.js";
import { badge, button, choice, clock, count, facts, field, fold, h, picture, s, table } from "./dom.js";
import { text } from "./rollout.js";

export const JOBS_SHOWN = 8; // `baton train status` lists all
const KIND = { done: "good", running: "good", refused: "odd", cancelled: "odd", failed: "bad" };
const ACTIVE = ["queued", "running"];

/** The progress that the trainer reports. */
function progress({ progress: report, state }) {
  if (!report.steps) return "–";
  const left = state === "running" && report.eta_s ? `, ${count(Math.ceil(report.eta_s / 60))} min left` : "";
  return `${count(report.step)} of ${count(report.steps)}${left}`;
}

/** The version that the job made, or the reason why it made none. */
function result(job) {
  const reason = job.error ?? (job.cancel && ACTIVE.includes(job.state) ? "stops at its next checkpoint" : null);
  return [job.version ?? (reason ? null : "–"), job.version && reason ? ": " : null, reason];
}

const COLUMNS = [
  ["Job", "", (job) => h("a", { href: `#/jobs/${job.id}`, title: job.id }, job.id.slice(0, 8))],
  ["Policy", "", (job) => job.policy],
  ["State", "", (job) => badge(job.state, KIND[job.state] ?? "")],
  ["Stage", "", (job) => job.stage ?? "–"],
  ["Progress", "n", progress],
  ["Result", "", result],
  ["Attempts", "n", (job) => count(job.attempts)],
  ["By", "", (job) => job.by],
  ["Since", "", (job) => clock(job.changed_at)],
];

/** The section; null where there are no jobs. */
export function jobs(list) {
  if (!list?.data) return h("p", { class: "bad" }, `Jobs: ${list?.error?.message}`);
  if (!list.data.length) return null;
  return h("section", { class: "jobs" }, table("Training jobs, latest first", COLUMNS, list.data));
}

// ---------------------------------------------------------------- submit

const FROM_SEARCH = ["key", "policy", "since", "until", "tag"]; // filters of a search of rollouts that a job has, too
const STEPS = 200;

/** The filters of a job from those of a search; the others do not choose rows of training. */
export function jobFilters(query) {
  const policy = query.get("policy") ?? "";
  const [name, ...value] = (query.get("tag") ?? "").split(":");
  return {
    ...(query.get("since") ? { since: query.get("since") } : {}),
    ...(query.get("until") ? { until: query.get("until") } : {}),
    ...(query.get("key") ? { keys: [query.get("key")] } : {}),
    ...(policy.includes("@") ? { policy_versions: [policy] } : {}),
    ...(value.length ? { tags: [[name, value.join(":")]] } : {}),
  };
}

function submit(api, query) {
  const filters = jobFilters(query);
  const left = [...query.keys()].filter((name) => !FROM_SEARCH.includes(name) && !["new", "before"].includes(name));
  ask({
    title: "Submit a job",
    text: "It selects rows, trains, runs the gate, and publishes what passes as a shadow.",
    label: "Submit",
    why: false,
    fields: [
      field("policy", "Policy", { value: "conductor", required: true }),
      choice("env", "Data", [["logged", "logged requests"], ["arena", "the arena"]], "logged"),
      h("label", {}, "Filters of the rows, as JSON", h("textarea", { name: "filters", rows: 4, spellcheck: "false" }, JSON.stringify(filters, null, 1))),
      left.length ? h("p", { class: "note" }, `A job has no such filter: ${left.join(", ")}.`) : null,
      field("steps", "Steps", { type: "number", min: 1, value: STEPS, required: true }),
      h("label", { class: "inline" }, h("input", { type: "checkbox", name: "auto" }), "A canary of 1 % when the gate passes it"),
    ],
    act: ({ policy, env, filters: written = "{}", steps, auto }) => {
      const train = { env, settings: { steps: Number(steps) } };
      if (env === "logged") train.filters = JSON.parse(written);
      return api("admin/jobs", { method: "POST", body: { policy, train, auto: auto === "on" } });
    },
    done: () => (query.get("new") ? (location.hash = "#/jobs") : api.reload()),
  });
}

// ---------------------------------------------------------------- steering

function steer(api, job, name) {
  const cancel = name === "cancel";
  ask({
    title: `${cancel ? "Cancel" : "Resume"} job ${job.id.slice(0, 8)}`,
    text: cancel ? "A queued job ends; a running one stops after its checkpoint." : "It goes on from its checkpoint.",
    label: cancel ? "Cancel the job" : "Resume",
    kind: cancel ? "danger" : "",
    why: false,
    act: () => api(`admin/jobs/${job.id}/${name}`, { method: "POST", body: {} }),
    done: api.reload,
  });
}

function buttons(api, job) {
  if (!api.mayChange()) return null;
  if (ACTIVE.includes(job.state)) return button("Cancel", () => steer(api, job, "cancel"), { "aria-label": `Cancel job ${job.id.slice(0, 8)}` });
  if (["failed", "cancelled"].includes(job.state)) return button("Resume", () => steer(api, job, "resume"), { "aria-label": `Resume job ${job.id.slice(0, 8)}` });
  return null;
}

/** How far the log is from a retraining, as `baton train status` says it. */
function countdown({ judged, requests, questions, countdown: left }) {
  const have = `${count(requests.have)} of ${count(requests.need)} requests to train on, ${count(questions.have)} of ${count(questions.need)} questions for the gate`;
  return h("p", { class: "note" }, `${count(judged)} judged requests: ${have}. ${left ? `${left[0].toUpperCase()}${left.slice(1)}.` : "A job on the log lacks nothing."}`);
}

async function every(api, query) {
  const [list, ready] = await Promise.all([api("admin/jobs?limit=200"), api("admin/jobs/readiness")]);
  const columns = api.mayChange() ? [...COLUMNS, ["Change", "", (job) => buttons(api, job) ?? "–"]] : COLUMNS;
  if (query.get("new") && api.mayChange()) queueMicrotask(() => submit(api, query));
  return [
    h("div", { class: "bar" }, h("h1", {}, "Jobs"), api.mayChange() ? button("Submit a job", () => submit(api, query)) : null),
    countdown(ready),
    list.data.length ? table("Training jobs, latest first", columns, list.data) : h("p", { class: "empty" }, "Nothing was trained yet."),
  ];
}

// ---------------------------------------------------------------- one job

const CURVE_PX = 160;
const TAIL_MS = 2_000;
const LINES_SHOWN = 1_000;
const STEP = /^step (\d+)\/(\d+) (?:.*?\breward (-?\d+(?:\.\d+)?))/; // the trainer's line of a step

/** [step, steps, reward] of each line of the log that has them. */
export function rewards(lines) {
  return lines.map(({ line }) => STEP.exec(line)).filter(Boolean).map((match) => match.slice(1).map(Number));
}

/** The reward over the steps; null before there are two. */
function curve(points) {
  if (points.length < 2) return null;
  const steps = points.at(-1)[1], values = points.map(([, , reward]) => reward);
  const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
  const label = `Mean reward over ${points.length} steps, from ${values[0].toFixed(3)} to ${values.at(-1).toFixed(3)}`;
  const draw = (width) => {
    const floor = CURVE_PX - 20, ceiling = 20;
    const line = points.map(([step, , reward]) =>
      `${((step / steps) * (width - 8) + 4).toFixed(1)},${(floor - ((reward - low) / span) * (floor - ceiling)).toFixed(1)}`);
    return [
      s("line", { class: "axis", x1: 0, x2: width, y1: floor + 4, y2: floor + 4 }),
      s("text", { x: 0, y: 12 }, `${high.toFixed(3)} at most`), s("text", { x: 0, y: CURVE_PX - 2 }, `${low.toFixed(3)} at least`),
      s("text", { x: width, y: CURVE_PX - 2, "text-anchor": "end" }, `step ${points.at(-1)[0]} of ${steps}`),
      s("polyline", { class: "curve", points: line.join(" ") }),
    ];
  };
  return h("figure", { class: "reward" }, h("figcaption", {}, "Mean reward by step"), picture(CURVE_PX, label, draw));
}

/** The curve and the log, which go on while the job is active and the page is shown. */
function follow(api, id) {
  const log = h("pre", { tabindex: 0, class: "log", "aria-label": "Log", role: "region" });
  const chart = h("div", {});
  const box = h("div", {}, chart, h("h2", {}, "Log"), log);
  const points = [], shown = [];
  let after = 0;
  const more = api.guard(async () => {
    const page = await api(`admin/jobs/${id}/log?after=${after}`);
    const here = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    after = page.next;
    points.push(...rewards(page.data));
    shown.push(...page.data.map(({ line }) => line));
    shown.splice(0, shown.length - LINES_SHOWN);
    if (page.data.length) {
      log.textContent = shown.join("\n");
      chart.replaceChildren(...[curve(points)].filter(Boolean));
      if (here) log.scrollTop = log.scrollHeight;
    }
    if (!page.whole) return more();
    if (!page.data.length && !shown.length) log.textContent = "No lines yet.";
    if (ACTIVE.includes(page.state)) setTimeout(() => box.isConnected && more(), TAIL_MS);
  });
  queueMicrotask(more);
  return box;
}

async function one(api, id) {
  const job = await api(`admin/jobs/${encodeURIComponent(id)}`);
  const { steps, step } = job.progress;
  const ended = Object.entries(job.progress).filter(([name]) => !["step", "steps", "eta_s"].includes(name));
  return [
    h("p", {}, h("a", { href: "#/jobs" }, "Jobs")),
    h("div", { class: "bar" }, h("h1", {}, "Job ", h("code", {}, job.id), " ", badge(job.state, KIND[job.state] ?? "")), buttons(api, job)),
    facts([["Policy", job.policy], ["Stage", job.stage], ["Progress", progress(job)], ["By", job.by], ["Attempts", count(job.attempts)],
      ["Submitted", clock(job.created_at)], ["Since", clock(job.changed_at)],
      ["Version", job.version ? h("a", { href: `#/policies/${encodeURIComponent(job.version)}` }, job.version) : null],
      ["Report", job.report, "wide"], ["Error", job.error, "wide bad"],
      ...ended.map(([name, value]) => [name, typeof value === "number" ? String(Math.round(value * 1e4) / 1e4) : String(value)])]),
    steps ? h("progress", { max: steps, value: step ?? 0, "aria-label": "Steps" }) : null,
    follow(api, job.id),
    fold("What it was asked to do", text(job.spec)),
  ];
}

export async function jobsPage(api, query, id) {
  return { title: id ? `Job ${id.slice(0, 8)}` : "Jobs", content: id ? await one(api, id) : await every(api, query) };
}
