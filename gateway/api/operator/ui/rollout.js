// Everything that was done for one request, as far as the key's log mode keeps it.

import { badge, badges, clock, count, facts, fold, h, micros, ms, table, usd } from "./dom.js";
import { explanation } from "./explain.js";
import { timeline } from "./timeline.js";
import { tokens } from "./tokens.js";

const NOT_LOGGED = { metadata: "not logged (the key's log mode is metadata)", redacted: "nothing" };

/** A block of text; for an absent one, the reason. */
export function text(value, mode) {
  if (value === null || value === undefined || value === "") {
    return h("p", { class: "note" }, NOT_LOGGED[mode] ?? "nothing");
  }
  return h("pre", { tabindex: 0 }, typeof value === "string" ? value : JSON.stringify(value, null, 2));
}

function titled(title, ...content) {
  return h("div", { class: "part" }, h("h4", {}, title), content);
}

/** The same right below the title of the page, where a heading of the fourth rank would skip two. */
function first(title, ...content) {
  return h("div", { class: "part" }, h("h2", { class: "small" }, title), content);
}

function took(part) {
  const [from, to] = [micros(part.started_at ?? part.created_at), micros(part.finished_at)];
  return from === null || to === null ? null : ms((to - from) / 1000);
}

function tokenCount(part) {
  return `${count(part.prompt_tokens)} in, ${count(part.completion_tokens)} out${part.usage_estimated ? " (estimated)" : ""}`;
}

function header(tree) {
  const handles = tree.pool.map((worker) => `${worker.handle}${worker.handle === worker.name ? "" : ` (${worker.name})`}`);
  return facts([
    ["Time", clock(tree.created_at)],
    ["Key", h("a", { href: `#/rollouts?key=${encodeURIComponent(tree.key_id)}` }, tree.key_id)],
    ["Asked for", tree.policy_requested],
    ["Planned by", tree.policy_version ?? tree.policy_used],
    ["Fallback", tree.fallback],
    ["Latency", took(tree)],
    ["Overhead", ms(tree.overhead_ms)],
    ["Cost", usd(tree.cost_nano)],
    ["Held", usd(tree.hold_nano)],
    ["Tokens", tokenCount(tree)],
    ["Task type", tree.task_type],
    ["End user", tree.end_user],
    ["Log", `${tree.log_mode}${tree.train ? "" : ", not for training"}${tree.stream ? ", streamed" : ""}`],
    ["Pool", `${tree.pool_name}: ${handles.join(", ")}`, "wide"],
    ["Pool file", tree.pool_revision ? h("code", {}, tree.pool_revision) : null, "wide"],
    ["Completion", h("code", {}, tree.completion_id), "wide"],
    ["Error", tree.error ? `${tree.error.code ?? ""} ${tree.error.message ?? ""}` : null, "wide bad"],
  ]);
}

/** The last message of the user. */
export function question(tree) {
  const messages = tree.request?.messages;
  return Array.isArray(messages) ? messages.filter((message) => message.role === "user").at(-1)?.content : null;
}

function conversation(messages, mode) {
  if (!messages.length) return text(null, mode);
  return messages.map((message) => titled(message.role, text(message.content ?? message.tool_calls, mode)));
}

function round(tree, each) {
  const plan = each.plan ? each.plan_text ?? JSON.stringify(each.plan) : each.plan_text;
  return h("article", {},
    h("h3", {}, `Round ${each.round}: ${each.planner}`, " ", each.refusal ? badge(`not used: ${each.refusal}`, "bad") : null),
    facts([["Took", took(each)], ["Cost", usd(each.cost_nano)], ["Version", each.policy_version], ["Prompt", each.prompt_version],
      ["Temperature", each.sampling.temperature], ["Tokens", each.plan_token_ids.length ? tokenCount(each) : null]]),
    each.flags?.length ? facts([["Flags", each.flags.join(", ")]]) : null,
    each.plan?.why ? titled("Why", text(each.plan.why, tree.log_mode)) : null,
    titled("Plan", text(plan, tree.log_mode)),
    each.planner === "conductor" ? titled("Sampled tokens", tokens(each)) : null,
    each.messages.length ? fold("The conductor's prompt", conversation(each.messages, tree.log_mode)) : null);
}

function sees(step) {
  return step.see.length ? `step ${step.see.join(", step ")}` : "no other step";
}

function step(tree, each) {
  const name = each.handle === each.worker ? each.worker : `${each.worker} (${each.handle})`;
  const task = each.task === null && tree.log_mode !== "metadata" ? "The conversation as the user sent it." : each.task;
  const child = tree.children.find((other) => other.id === each.child_rollout_id);
  const attempts = [
    ["Attempt", "n", (row) => each.attempts.indexOf(row) + 1],
    ["Took", "n", (row) => ms((row.finished_us - row.started_us) / 1000)],
    ["Error", "", (row) => row.error ?? "none"],
    ["Status", "n", (row) => row.upstream_status ?? "–"],
    ["Worker", "", (row) => row.worker ?? each.worker],
    ["Verdict", "", (row) => verdict(row.verdict)],
    ["Tool", "", (row) => toolCall(row.tool)],
    ["Summary", "", (row) => summary(row.summary)],
    ["Cut", "", (row) => cut(row.cut)],
  ];
  return h("article", {},
    h("h3", {}, `Step ${each.step}: ${name} `, badges(each)),
    facts([["Round", each.round], ["Kind", each.kind], ["Sees", sees(each)], ["Took", took(each)],
      ["First byte", each.first_byte_at ? ms((micros(each.first_byte_at) - micros(each.started_at)) / 1000) : null],
      ["Cost", usd(each.cost_nano)], ["Tokens", tokenCount(each)], ["Ended by", each.finish_reason], ["Error", each.error]]),
    titled("Task", text(task, tree.log_mode)),
    titled("Reply", text(each.reply ?? each.tool_calls, tree.log_mode)),
    fold("Its prompt", conversation(each.messages, tree.log_mode)),
    each.attempts.length > 1 || each.attempts.some((row) => row.verdict || row.tool || row.cut || row.summary) ? table("Attempts", attempts, each.attempts) : null,
    child ? h("section", { class: "child" }, h("h3", {}, "Child loop ", badges(child)), loop(child)) : null);
}

/** What a check said of an attempt's reply, and why. */
function verdict(said) {
  if (!said) return "–";
  const word = said.accept === null ? "unchecked" : said.accept ? "accepted" : "rejected";
  return said.why ? `${word}: ${said.why}` : word;
}

/** A tool that was called, with its arguments and the length of its answer. */
function toolCall(call) {
  if (!call) return "–";
  const answer = call.chars === null || call.chars === undefined ? "failed" : `${count(call.chars)} characters`;
  return `${call.name}(${JSON.stringify(call.arguments ?? {})}): ${answer}`;
}

/** A call that summed up turns of the conversation, with what it cost. */
function summary(made) {
  return made ? `of ${count(made.messages)} messages, ${usd(made.cost_nano)}` : "–";
}

/** What was cut of the conversation so that it fits the worker's context, and what came of a summary of it. */
function cut(parts) {
  if (!parts) return "–";
  const some = Object.entries(parts).filter(([, amount]) => amount).sort();
  const shown = (amount) => (typeof amount === "number" ? count(amount) : amount.replaceAll("_", " "));
  return some.map(([name, amount]) => `${name.replaceAll("_", " ")}: ${shown(amount)}`).join(", ");
}

/** Rounds and steps in the order of the plan, with child loops inside their steps. */
function loop(tree) {
  const numbers = [...new Set([...tree.rounds, ...tree.steps].map((part) => part.round))].sort((a, b) => a - b);
  const ofRound = (parts, number) => parts.filter((part) => part.round === number);
  return numbers.flatMap((number) => [
    ...ofRound(tree.rounds, number).map((each) => round(tree, each)),
    ...ofRound(tree.steps, number).map((each) => step(tree, each)),
  ]);
}

const OUTCOMES = [
  ["Time", "", (row) => clock(row.created_at)],
  ["Kind", "", (row) => row.kind],
  ["Value", "n", (row) => row.value ?? "–"],
  ["Says", "", (row) => row.label ?? row.comment ?? (row.demonstration ? JSON.stringify(row.demonstration) : "–")],
  ["Source", "", (row) => row.source],
];

function legend() {
  const sample = (kind, name) => h("li", {}, h("i", { class: kind }), name);
  return h("ul", { class: "legend" }, sample("plan", "planning"), sample("waiting", "step"), sample("ok", "attempt at the worker"),
    sample("failed", "failed"), sample("first", "first byte"), sample("see", "arrow: the reply was seen by"));
}

export async function rollout(api, query, id) {
  const tree = await api(`admin/rollouts/${encodeURIComponent(id)}`);
  const reply = tree.reply?.choices?.[0]?.message;
  const unknown = (error) => ({ first: h("p", { class: "note" }, `Why it went this way is unknown: ${error.message}`), rest: null });
  const why = await explanation(api, tree.id).catch(unknown);
  const content = [
    h("p", {}, h("a", { href: "#/rollouts" }, "Rollouts")),
    h("h1", {}, "Rollout ", h("code", {}, tree.id), " ", badges(tree)),
    why.first,
    header(tree),
    h("div", { class: "pair" },
      first("Question", text(question(tree), tree.log_mode)),
      first("Reply", text(reply?.content ?? reply?.tool_calls, tree.log_mode))),
    h("section", {}, h("h2", {}, "Timeline"), timeline(tree) ?? h("p", { class: "note" }, "It ended before anything was planned."), legend()),
    h("section", {}, h("h2", {}, "Plan and steps"), loop(tree)),
    why.rest,
    h("section", {}, h("h2", {}, "Outcomes"), tree.outcomes.length
      ? table("Judgements of this rollout", OUTCOMES, tree.outcomes)
      : h("p", { class: "note" }, "It has no outcome. The application can give one, with its own key: ",
        h("code", {}, `POST /v1/outcomes {"rollout_id": "${tree.id}", "value": true}`))),
    fold("Everything, as JSON", text(tree)),
  ];
  return { title: `Rollout ${tree.id.slice(0, 8)}`, content };
}
