// Training jobs: what each is at, how far it is, and what came of it.

import { badge, clock, count, h, table } from "./dom.js";

export const JOBS_SHOWN = 8; // `baton train status` names them all
const KIND = { done: "good", running: "good", refused: "odd", cancelled: "odd", failed: "bad" };
const ACTIVE = ["queued", "running"];

/** How far the trainer says it is. */
function progress({ progress: told, state }) {
  if (!told.steps) return "–";
  const left = state === "running" && told.eta_s ? `, ${count(Math.ceil(told.eta_s / 60))} min left` : "";
  return `${count(told.step)} of ${count(told.steps)}${left}`;
}

/** What came of it: the version it made, and the reason where none serves. */
function result(job) {
  const said = job.error ?? (job.cancel && ACTIVE.includes(job.state) ? "stops at its next checkpoint" : null);
  return [job.version ?? (said ? null : "–"), job.version && said ? ": " : null, said];
}

const COLUMNS = [
  ["Job", "", (job) => h("code", { title: job.id }, job.id.slice(0, 8))],
  ["Policy", "", (job) => job.policy],
  ["State", "", (job) => badge(job.state, KIND[job.state] ?? "")],
  ["Stage", "", (job) => job.stage ?? "–"],
  ["Progress", "n", progress],
  ["Result", "", result],
  ["Taken up", "n", (job) => count(job.attempts)],
  ["By", "", (job) => job.by],
  ["Since", "", (job) => clock(job.changed_at)],
];

/** The section; nothing where no job was ever submitted. */
export function jobs(found) {
  if (!found?.data) return h("p", { class: "bad" }, `Jobs: ${found?.error?.message}`);
  if (!found.data.length) return null;
  return h("section", { class: "jobs" }, table("Training jobs, latest first", COLUMNS, found.data));
}
