// The playground: a prompt in; the reply, the plan as a drawing, its steps and what they cost.

import { badge, badges, button, choice, count, facts, field, h, ms, table, usd, values } from "./dom.js";
import { text } from "./rollout.js";
import { timeline } from "./timeline.js";

const POLL_MS = 300;
const POLLS_MAX = 40; // the log has a rollout as soon as the shipper wrote it

const wait = (delayMs) => new Promise((done) => setTimeout(done, delayMs));

/** The rollout, once the log has it; null where it does not come. */
async function logged(api, key, id) {
  for (let n = 0; n < POLLS_MAX; n += 1) {
    const latest = await api(`admin/rollouts?${new URLSearchParams({ key })}`);
    if (latest.data.some((row) => row.id === id)) return api(`admin/rollouts/${id}`);
    await wait(POLL_MS);
  }
  return null;
}

const STEPS = [
  ["Step", "n", (row) => `${row.round}.${row.step}`],
  ["Worker", "", (row) => row.worker],
  ["Task", "", (row) => row.task ?? "the conversation"],
  ["Sees", "", (row) => row.see.join(", ") || "–"],
  ["Reply", "", (row) => (row.reply ?? row.error ?? "–").slice(0, 120)],
  ["Tokens", "n", (row) => `${count(row.prompt_tokens)} / ${count(row.completion_tokens)}`],
  ["Cost", "n", (row) => usd(row.cost_nano)],
  ["Status", "", badges],
];

function shown(tree) {
  return [
    h("h2", {}, "Plan"),
    facts([["Planned by", tree.policy_version ?? tree.policy_used], ["Fallback", tree.fallback], ["Rounds", count(tree.rounds.length)],
      ["Cost", usd(tree.cost_nano)], ["Held", usd(tree.hold_nano)], ["Overhead", ms(tree.overhead_ms)],
      ["Rollout", h("a", { href: `#/rollouts/${tree.id}` }, tree.id)]]),
    ...tree.rounds.map((round) => (round.plan?.why ? h("p", { class: "note" }, `Round ${round.round}: ${round.plan.why}`) : null)),
    timeline(tree),
    table("Steps", STEPS, tree.steps),
  ];
}

export async function playground(api) {
  const keys = (await api("admin/keys")).data.filter((key) => key.class === "data" && !key.revoked_at);
  if (!api.mayChange()) {
    return { title: "Playground", content: [h("h1", {}, "Playground"), h("p", { class: "empty" }, "Your role reads only; a prompt spends money.")] };
  }
  if (!keys.length) return { title: "Playground", content: [h("h1", {}, "Playground"), h("p", { class: "empty" }, "There is no data key to ask with. ", h("a", { href: "#/money" }, "Create one"))] };
  const result = h("div", { "aria-live": "polite" });
  const press = h("button", { type: "submit" }, "Ask");
  const submit = api.guard(async (event) => {
    event.preventDefault();
    const { key, model, system, prompt } = values(event.currentTarget);
    const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: prompt }];
    press.disabled = true;
    result.replaceChildren(h("p", { class: "note" }, "Working…"));
    try {
      const { json, headers } = await api("admin/playground", { method: "POST", body: { key, model, messages }, whole: true });
      const message = json.choices?.[0]?.message;
      const reply = [h("h2", {}, "Reply"), h("div", { class: "part" }, text(message?.content ?? message?.tool_calls))];
      result.replaceChildren(...reply, h("p", { class: "note" }, "Waiting for the log…"));
      const tree = await logged(api, key, headers.get("x-baton-rollout-id"));
      result.replaceChildren(...reply, ...(tree ? shown(tree).filter(Boolean) : [h("p", { class: "note" }, "The log does not have it yet.")]));
    } catch (error) {
      result.replaceChildren(badge("failed", "bad"));
      throw error;
    } finally {
      press.disabled = false;
    }
  });
  const content = [
    h("h1", {}, "Playground"),
    h("p", { class: "note" }, "A prompt is a request like any other: it spends the key's budget and is in the log."),
    h("form", { class: "stack ask", submit, "aria-label": "Prompt" },
      h("div", { class: "filters" }, choice("key", "As key", keys.map((key) => [key.id, key.name])), field("model", "Model", { value: "baton", required: true })),
      field("system", "System message (optional)"),
      h("label", {}, "Prompt", h("textarea", { name: "prompt", rows: 5, required: true })),
      h("div", { class: "tools" }, press, button("Clear", () => result.replaceChildren()))),
    result,
  ];
  return { title: "Playground", content };
}
