// The frame of the page: the key, the routes, the error line. Pages are functions (api, query, argument) => elements.

import { overview } from "./overview.js";
import { rollout } from "./rollout.js";
import { rollouts } from "./rollouts.js";

const KEY = "baton-admin-key";
const TIMEOUT_MS = 15_000;
const REFRESH_MS = 10_000;
const REST = 20; // a page that takes 1 s to load is loaded again after REST seconds at the earliest
const byId = (id) => document.getElementById(id);
const [main, login, errorLine, forget] = ["main", "login", "error", "forget"].map(byId);
let restUntilMs = 0;
let shown = 0; // counts navigations, so that a late reply does not overwrite a newer page

class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** GET a JSON document of the admin API. Throws ApiError with one line for people; its status is 0 without a reply. */
async function api(path, { accept = [] } = {}) {
  const headers = { authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}` };
  let reply;
  try {
    reply = await fetch(`../${path}`, { headers, signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch {
    throw new ApiError(0, "The gateway does not answer; is it running?");
  }
  const body = await reply.json().catch(() => null);
  if (reply.ok || accept.includes(reply.status)) return body;
  throw new ApiError(reply.status, body?.error?.message ?? `The gateway answered ${reply.status}.`);
}

function route() {
  const [path, search] = location.hash.replace(/^#/, "").split("?");
  const [, first, argument] = path.split("/");
  const page = first === "rollouts" ? (argument ? rollout : rollouts) : overview;
  return { page, argument: argument && decodeURIComponent(argument), query: new URLSearchParams(search) };
}

function ask(message) {
  login.hidden = false;
  forget.hidden = true;
  main.replaceChildren();
  errorLine.textContent = message;
  byId("key").focus();
}

async function show({ again = false } = {}) {
  const turn = again ? shown : ++shown;
  const { page, argument, query } = route();
  for (const [id, here] of [["nav-overview", page === overview], ["nav-rollouts", page !== overview]]) {
    if (here) byId(id).setAttribute("aria-current", "page");
    else byId(id).removeAttribute("aria-current");
  }
  if (!sessionStorage.getItem(KEY)) return ask("");
  login.hidden = true;
  forget.hidden = false;
  const beganMs = Date.now();
  restUntilMs = Infinity;
  if (!again) main.setAttribute("aria-busy", "true");
  try {
    const { title, content } = await page(api, query, argument);
    if (turn !== shown) return;
    document.title = `${title} · Baton`;
    main.replaceChildren(...content.filter(Boolean));
    errorLine.textContent = "";
    if (!again) window.scrollTo(0, 0);
  } catch (error) {
    if (turn !== shown) return;
    if (error.status === 401) {
      sessionStorage.removeItem(KEY);
      return ask(error.message);
    }
    errorLine.textContent = error.message;
    if (!again) main.replaceChildren();
  } finally {
    if (turn === shown) {
      main.removeAttribute("aria-busy");
      restUntilMs = Date.now() + REST * (Date.now() - beganMs);
    }
  }
}

/** Load the overview again, unless the reader is at work on it: a part has the focus, or text is selected. */
function refresh() {
  const busy = main.contains(document.activeElement) && document.activeElement !== main;
  const reading = !document.getSelection().isCollapsed;
  if (document.hidden || busy || reading || Date.now() < restUntilMs || !sessionStorage.getItem(KEY)) return;
  if (route().page === overview) show({ again: true });
}

login.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  show();
});
forget.addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  ask("");
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", () => show());
setInterval(refresh, REFRESH_MS);
show();
