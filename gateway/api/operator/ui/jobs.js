// Training jobs: stage, progress and result of each.

import { badge, clock, count, h, table } from "./dom.js";

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
  ["Job", "", (job) => h("code", { title: job.id }, job.id.slice(0, 8))],
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
