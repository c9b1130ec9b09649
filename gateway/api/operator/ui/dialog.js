// The dialog that stands before every change: what happens, to what, and why.

import { button, field, h, values } from "./dom.js";

/** Ask before a change. `fields` are elements of the form; `act` gets its values, with `why`, and what it raises is
 * shown in the dialog, which stays open. `done` runs after the dialog has closed. */
export function ask({ title, text, fields = [], label, kind = "", why = true, act, done }) {
  const error = h("p", { role: "alert", class: "bad" });
  const submit = async (event) => {
    event.preventDefault();
    const press = dialog.querySelector("button[type=submit]");
    press.disabled = true;
    try {
      await act(values(event.currentTarget.closest("form")));
    } catch (problem) {
      error.textContent = problem.message;
      press.disabled = false;
      return;
    }
    dialog.close();
    await done?.();
  };
  const dialog = h("dialog", { "aria-labelledby": "dialog-title", close: () => dialog.remove() },
    h("form", { submit, class: "stack" },
      h("h2", { id: "dialog-title" }, title), text ? h("p", {}, text) : null, fields,
      why ? field("why", "Why (written to the audit)", { maxlength: 1000 }) : null, error,
      h("div", { class: "tools" }, h("button", { type: "submit", class: kind }, label), button("Cancel", () => dialog.close()))));
  document.body.append(dialog);
  dialog.showModal();
}

/** Show something that is seen this once, such as the secret of a key. */
export function tell({ title, text, secret }) {
  const dialog = h("dialog", { "aria-labelledby": "dialog-title", close: () => dialog.remove() },
    h("h2", { id: "dialog-title" }, title), h("p", {}, text), h("pre", { tabindex: 0 }, secret),
    h("div", { class: "tools" }, button("Close", () => dialog.close())));
  document.body.append(dialog);
  dialog.showModal();
}
