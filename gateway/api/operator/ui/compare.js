// Two rollouts side by side; facts that differ are marked.

import { badges, clock, count, h, micros, ms, usd } from "./dom.js";
import { question, text } from "./rollout.js";

const plan = (round) => (round.planner === "conductor" ? round.plan_text : round.plan);
const took = (tree) => (tree.finished_at ? ms((micros(tree.finished_at) - micros(tree.created_at)) / 1000) : "–");
const outcome = (tree) => tree.outcomes.map((one) => one.value ?? one.label ?? one.kind).join(", ") || "–";

const FACTS = [
  ["Time", (tree) => clock(tree.created_at)],
  ["Key", (tree) => tree.key_id],
  ["Asked for", (tree) => tree.policy_requested],
  ["Planned by", (tree) => tree.policy_version ?? tree.policy_used],
  ["Status", badges],
  ["Answered by", (tree) => tree.steps.map((step) => step.worker).join(", ") || "none"],
  ["Rounds", (tree) => count(tree.rounds.length)],
  ["Steps", (tree) => count(tree.steps.length)],
  ["Cost", (tree) => usd(tree.cost_nano)],
  ["Latency", took],
  ["Tokens", (tree) => `${count(tree.prompt_tokens)} in, ${count(tree.completion_tokens)} out`],
  ["Outcome", outcome],
  ["Task type", (tree) => tree.task_type ?? "–"],
  ["Pool", (tree) => tree.pool_name],
  ["Pool file", (tree) => tree.pool_revision?.slice(0, 12) ?? "–"],
];

function facts(trees) {
  const rows = FACTS.map(([name, read]) => {
    const cells = trees.map((tree) => h("td", {}, read(tree)));
    const differs = cells.some((cell) => cell.textContent !== cells[0].textContent);
    return h("tr", { class: differs ? "differs" : null }, h("th", { scope: "row" }, name), cells,
      h("td", {}, differs ? "differs" : ""));
  });
  const head = trees.map((tree) => h("th", { scope: "col" }, h("a", { href: `#/rollouts/${tree.id}` }, tree.id.slice(0, 18))));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Facts" },
    h("table", {}, h("caption", {}, "Facts"), h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Fact"), head, h("th", { scope: "col" }, "Same?"))),
      h("tbody", {}, rows)));
}

function part(title, trees, read) {
  const cells = trees.map((tree) => h("div", { class: "part" }, text(read(tree), tree.log_mode)));
  return h("section", {}, h("h2", {}, title), h("div", { class: "pair" }, cells));
}

function steps(tree) {
  return tree.steps.map((step) => `${step.round}.${step.step} ${step.worker}: ${step.reply ?? step.error ?? step.status}`).join("\n\n");
}

export async function compare(api, query, ...ids) {
  const trees = await Promise.all(ids.map((id) => api(`admin/rollouts/${encodeURIComponent(id)}`)));
  const content = [
    h("p", {}, h("a", { href: "#/rollouts" }, "Rollouts")),
    h("h1", {}, "Two rollouts"),
    facts(trees),
    part("Question", trees, question),
    part("Plans", trees, (tree) => tree.rounds.map(plan).map((one) => (typeof one === "string" ? one : JSON.stringify(one, null, 1))).join("\n")),
    part("Replies of steps", trees, steps),
    part("Reply", trees, (tree) => tree.reply?.choices?.[0]?.message?.content ?? tree.reply?.choices?.[0]?.message?.tool_calls),
  ];
  return { title: "Two rollouts", content };
}
