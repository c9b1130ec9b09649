// The frame of the page: the key, the routes, the error line. Pages are functions (api, query, ...arguments) => {title, content}.

import { audit } from "./audit.js";
import { compare } from "./compare.js";
import { jobsPage } from "./jobs.js";
import { money } from "./money.js";
import { overview } from "./overview.js";
import { playground } from "./playground.js";
import { policiesPage } from "./policies.js";
import { rollout } from "./rollout.js";
import { rollouts } from "./rollouts.js";
import { workers } from "./workers.js";

// pages by the first part of the route: [without an argument, with one]
const PAGES = {
  "": [overview], rollouts: [rollouts, rollout], compare: [rollouts, compare], policies: [policiesPage, policiesPage],
  jobs: [jobsPage, jobsPage], workers: [workers], money: [money], audit: [audit], playground: [playground],
};
const LINKS = { compare: "rollouts" }; // pages under the link of another

const KEY = "baton-admin-key";
const TIMEOUT_MS = 15_000;
const LONG_MS = 180_000; // of changes and exports
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

/** Ask the admin API: GET, unless there is a `method`; a `body` is sent as JSON. Returns the document, with `text` the
 * text of the reply, with `whole` both document and headers. Throws ApiError with one line for people; its status is 0 without a reply. */
async function api(path, { accept = [], method = "GET", body, text = false, whole = false } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { "baton-console": "1" }; // without it the cookie of a login counts for nothing
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const signal = AbortSignal.timeout(method === "GET" && !text ? TIMEOUT_MS : LONG_MS);
  let reply;
  try {
    reply = await fetch(`../${path}`, { headers, method, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new ApiError(0, "The gateway does not answer; is it running?");
  }
  if (reply.ok && text) return reply.text();
  const json = await reply.json().catch(() => null);
  if (reply.ok || accept.includes(reply.status)) return whole ? { json, headers: reply.headers } : json;
  throw new ApiError(reply.status, json?.error?.message ?? `The gateway answered ${reply.status}.`);
}

/** What the key may do; null until it is known. */
api.role = null;
api.mayChange = () => api.role === "admin" || api.role === "operator";

/** A handler of events that shows the error of an action in the error line. */
api.guard = (action) => async (event) => {
  try {
    await action(event);
    errorLine.textContent = "";
  } catch (error) {
    errorLine.textContent = error.message;
  }
};

/** Load the page again, after a change. */
api.reload = () => show({ again: true });

function route() {
  const [path, search] = location.hash.replace(/^#/, "").split("?");
  const [, first = "", ...rest] = path.split("/");
  const name = Object.hasOwn(PAGES, first) ? first : "";
  const parts = rest.filter(Boolean).map(decodeURIComponent);
  const page = PAGES[name][parts.length ? 1 : 0] ?? PAGES[name][0];
  return { page, link: LINKS[name] ?? name, parts, query: new URLSearchParams(search) };
}

/** Learn who acts, by key or by login, and show the role. */
async function identify() {
  const me = await api("admin/me");
  api.role = me.role;
  byId("role").textContent = api.role;
  byId("role").title = me.actor;
  forget.textContent = sessionStorage.getItem(KEY) ? "Forget key" : "Log out";
}

function ask(message) {
  api.role = null;
  byId("role").textContent = "";
  login.hidden = false;
  forget.hidden = true;
  main.replaceChildren();
  errorLine.textContent = message;
  byId("key").focus();
}

async function show({ again = false } = {}) {
  const turn = again ? shown : ++shown;
  const { page, link, parts, query } = route();
  for (const each of document.querySelectorAll("header nav a")) {
    if (each.getAttribute("href") === `#/${link}`) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  if (!sessionStorage.getItem(KEY) && !(await ways).oidc) return ask("");
  if (turn !== shown) return;
  login.hidden = true;
  forget.hidden = false;
  const beganMs = Date.now();
  restUntilMs = Infinity;
  if (!again) main.setAttribute("aria-busy", "true");
  try {
    if (api.role === null) await identify();
    const { title, content } = await page(api, query, ...parts);
    if (turn !== shown) return;
    document.title = `${title} · Baton`;
    main.replaceChildren(...content.filter(Boolean));
    errorLine.textContent = "";
    if (!again) window.scrollTo(0, 0);
  } catch (error) {
    if (turn !== shown) return;
    if (error.status === 401) {
      const spoke = sessionStorage.getItem(KEY) || api.role !== null; // a first visit without a login is no error
      sessionStorage.removeItem(KEY);
      return ask(spoke ? error.message : "");
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
  if (document.hidden || busy || reading || Date.now() < restUntilMs || api.role === null) return;
  if (route().page === overview) show({ again: true });
}

login.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  show();
});
forget.addEventListener("click", api.guard(async () => {
  const byKey = sessionStorage.getItem(KEY);
  sessionStorage.removeItem(KEY);
  if (!byKey) await api("login/out", { method: "POST" });
  ask("");
}));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", () => show());
/** How one may log in beside a key. */
const ways = fetch("../login/ways").then((reply) => reply.json()).catch(() => ({ oidc: false }));
ways.then(({ oidc }) => { byId("oidc").hidden = !oidc; });
setInterval(refresh, REFRESH_MS);
show();
