// The page: two views, the theme, and the server state in the corner.

import { Chat } from "./chat/chat.js";
import { find, h, icon, setText } from "./lib/dom.js";
import { LiveView } from "./live/live.js";
import { askKey } from "./chat/settings.js";
import { stateOf } from "./live/engine_state.js";
import { StatusFeed } from "./live/status_feed.js";

const TOAST_MS = 7000;
const feed = new StatusFeed();
let toastTimer = 0;

const page = {
  announce: (text) => setText(find("#announcer"), text),

  /** `quietly`: only updates the address. */
  go(route, quietly = false) {
    if (quietly) history.replaceState(null, "", route);
    else if (location.hash === route) show();
    else location.hash = route;
  },

  toast(text, action = null) {
    const box = find("#toast");
    const hide = () => (box.hidden = true);
    const button = action && h("button", { type: "button", onclick: () => (hide(), action.run()) }, action.label);
    box.replaceChildren(h("span", {}, text), ...(button ? [button] : []));
    box.hidden = false;
    clearTimeout(toastTimer);
    toastTimer = setTimeout(hide, TOAST_MS);
  },

  askKey: () =>
    askKey(() => {
      chat.keyGiven();
      feed.retry();
    }),
};

const chat = new Chat(page);
const live = new LiveView(find("#live"), () => page.askKey());

function show() {
  const [, view, id] = location.hash.split("/");
  const isLive = view === "live";
  find("#chat").hidden = isLive;
  find("#live").hidden = !isLive;
  for (const link of document.querySelectorAll("nav a")) {
    if ((link.dataset.view === "live") === isLive) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = isLive ? "Live – Windlass" : "Windlass";
  if (isLive) live.show(feed);
  else chat.route(id ?? "");
}

function showState({ link, status }) {
  const { tone, short } = stateOf(link, status);
  const chip = find("#chip");
  chip.dataset.tone = tone;
  setText(find(".chip-model", chip), status?.model ?? "");
  setText(find(".chip-state", chip), short);
}

// --- theme -----------------------------------------------------------------------------------------------------------

const systemDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (systemDark.matches ? "dark" : "light")) === "dark";

function labelTheme() {
  const label = isDark() ? "Use the light theme" : "Use the dark theme";
  find("#theme").setAttribute("aria-label", label);
  find("#theme").title = label;
}

/** Choosing the system's theme means following the system again. */
function switchTheme() {
  const wanted = isDark() ? "light" : "dark";
  const follows = (wanted === "dark") === systemDark.matches;
  if (follows) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = wanted;
  try {
    if (follows) localStorage.removeItem("windlass.theme");
    else localStorage.setItem("windlass.theme", wanted);
  } catch {
    // No storage: the choice lasts until the page is closed.
  }
  labelTheme();
}

find("#theme").append(icon("theme"));
find("#theme").addEventListener("click", switchTheme);
systemDark.addEventListener("change", labelTheme);
labelTheme();

find(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  find(find("#chat").hidden ? "#live" : "#question").focus();
});
window.addEventListener("hashchange", show);
show();
feed.listen(showState);
feed.listen((now) => chat.status(now));
feed.listen((now) => live.update(now));
feed.listen(({ link }) => link === "key" && page.askKey());
feed.start();
