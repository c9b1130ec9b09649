// The timeline of a rollout: a row for each planning and each step, child loops indented below their step.

import { micros, ms, picture, s } from "./dom.js";

const ROW_PX = 38;
const HEAD_PX = 22;
const BAR_TOP_PX = 18;
const BAR_PX = 14;
const INDENT_PX = 16;
const CHAR_PX = 6.4;
const TICKS = 4;

function planRow(rollout, round, depth) {
  const tokens = round.completion_tokens ? ` · ${round.completion_tokens} tokens` : "";
  return {
    depth, kind: "plan", bad: round.refusal !== null, attempts: [], sees: [], firstUs: null,
    startUs: micros(round.started_at), endUs: micros(round.finished_at),
    label: `round ${round.round}: ${round.planner} plans${tokens}${round.refusal ? ` · not used: ${round.refusal}` : ""}`,
  };
}

function stepRow(rollout, step, depth) {
  const tries = step.attempts.length > 1 ? ` · ${step.attempts.length} attempts` : "";
  const ended = step.status === "done" ? "" : ` · ${step.status}`;
  return {
    depth, kind: "step", bad: step.status !== "done", attempts: step.attempts, firstUs: micros(step.first_byte_at),
    startUs: micros(step.started_at), endUs: micros(step.finished_at),
    id: `${rollout.id}/${step.step}`, sees: step.see.map((seen) => `${rollout.id}/${seen}`),
    label: `step ${step.step}: ${step.worker}${tries}${ended}`,
  };
}

/** The rows, from top to bottom. */
export function rowsOf(rollout, depth = 0) {
  const numbers = new Set([...rollout.rounds, ...rollout.steps].map((part) => part.round));
  return [...numbers].sort((a, b) => a - b).flatMap((number) => [
    ...rollout.rounds.filter((round) => round.round === number).map((round) => planRow(rollout, round, depth)),
    ...rollout.steps.filter((step) => step.round === number).flatMap((step) => [
      stepRow(rollout, step, depth),
      ...rollout.children.filter((child) => child.id === step.child_rollout_id).flatMap((child) => rowsOf(child, depth + 1)),
    ]),
  ]);
}

function axis(width, height, spanUs) {
  return Array.from({ length: TICKS + 1 }, (_, i) => {
    const x = (i / TICKS) * (width - 2) + 1;
    const anchor = i === 0 ? "start" : i === TICKS ? "end" : "middle";
    return [
      s("line", { class: "axis", x1: x, x2: x, y1: HEAD_PX - 4, y2: height }),
      s("text", { x, y: 12, "text-anchor": anchor }, ms((i / TICKS) * spanUs / 1000)),
    ];
  });
}

/** A row: its time as a pale bar, each attempt as a strong one on it, and a mark at the first byte. */
function drawn(row, top, at) {
  const y = top + BAR_TOP_PX;
  const block = (name, fromUs, toUs) =>
    s("rect", { class: name, x: at(fromUs), y, width: Math.max(at(toUs) - at(fromUs), 2), height: BAR_PX, rx: 2 });
  const kind = row.kind === "plan" ? `plan${row.bad ? " failed" : ""}` : `waiting${row.bad ? " failed" : ""}`;
  const parts = [block(kind, row.startUs, row.endUs)];
  for (const attempt of row.attempts) {
    const bar = block(attempt.error ? "failed" : "ok", attempt.started_us, attempt.finished_us);
    bar.append(s("title", {}, attempt.error ? `attempt failed: ${attempt.error}` : "attempt"));
    parts.push(bar);
  }
  if (row.firstUs) {
    const x = at(row.firstUs);
    parts.push(s("path", { class: "first", d: `M${x} ${y - 3}V${y + BAR_PX + 3}M${x - 3} ${y - 3}h6` }));
  }
  return parts;
}

/** An arrow from the end of a step to the start of a step that sees its reply. */
function arrow(from, to, tops, at) {
  const [x1, x2] = [at(from.endUs), at(to.startUs)];
  const [y1, y2] = [from, to].map((row) => tops.get(row) + BAR_TOP_PX + BAR_PX / 2);
  const bend = Math.max(12, Math.abs(x2 - x1) / 2);
  return s("g", { class: "see" },
    s("path", { d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2 - 4} ${y2}` }),
    s("path", { class: "head", d: `M${x2} ${y2}l-6 -4v8z` }));
}

function label(row, top, width) {
  const x = 2 + row.depth * INDENT_PX;
  const text = `${row.depth ? "↳ " : ""}${row.label} · ${ms((row.endUs - row.startUs) / 1000)}`;
  const room = Math.floor((width - x) / CHAR_PX);
  const short = text.length > room ? `${text.slice(0, room - 1)}…` : text;
  return s("text", { class: "label", x, y: top + 13 }, short, s("title", {}, text));
}

/** The picture; null where no row has times. */
export function timeline(rollout) {
  const rows = rowsOf(rollout).filter((row) => row.startUs !== null && row.endUs !== null);
  if (!rows.length) return null;
  const zeroUs = Math.min(micros(rollout.created_at), ...rows.map((row) => row.startUs));
  const endUs = Math.max(micros(rollout.finished_at) ?? 0, ...rows.map((row) => row.endUs), zeroUs + 1);
  const height = HEAD_PX + rows.length * ROW_PX + 4;
  const tops = new Map(rows.map((row, i) => [row, HEAD_PX + i * ROW_PX]));
  const byId = new Map(rows.map((row) => [row.id, row]));
  const labels = rows.map((row) => `${row.label}, from ${ms((row.startUs - zeroUs) / 1000)} to ${ms((row.endUs - zeroUs) / 1000)}`);
  return picture(height, `Timeline of ${ms((endUs - zeroUs) / 1000)}. ${labels.join(". ")}`, (width) => {
    const at = (us) => 1 + ((us - zeroUs) / (endUs - zeroUs)) * (width - 2);
    return [
      axis(width, height, endUs - zeroUs),
      rows.map((row) => [label(row, tops.get(row), width), drawn(row, tops.get(row), at)]),
      rows.flatMap((row) => row.sees.filter((id) => byId.has(id)).map((id) => arrow(byId.get(id), row, tops, at))),
    ];
  });
}
