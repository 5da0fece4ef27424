// The frame of the page: views, language, colours, and the connection to the board.
import { setLanguage, t } from "./words.js";
import * as plan from "./plan.js";
import * as runs from "./runs.js";

const VIEWS = { runs, plan };
const remembered = (key, fallback) => { try { return localStorage.getItem(key) ?? fallback; } catch { return fallback; } };
const remember = (key, value) => { try { localStorage.setItem(key, value); } catch { /* a private window */ } };
const byId = (id) => document.getElementById(id);
let source = null, watched = null;

function setTheme(theme) {
  const dark = theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  for (const view of Object.values(VIEWS)) view.redraw();
}

// Receives events of the list and of the shown runs; receives none while the page is hidden.
export function watch(names) {
  const wanted = document.hidden ? null : JSON.stringify(names);
  if (wanted === watched) return;
  source?.close();
  watched = wanted;
  if (wanted === null) return;
  source = new EventSource(`api/events?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`);
  source.onopen = () => connection("connected");
  source.onerror = () => connection("lost");
  source.addEventListener("runs", (event) => runs.takeRows(JSON.parse(event.data)));
  source.addEventListener("run", (event) => runs.takeRun(JSON.parse(event.data)));
}

function connection(state) {
  if (byId("connection").dataset.state === state) return;
  byId("connection").dataset.state = state;
  byId("connection").textContent = t(state);
}

const decoded = (words) => { try { return words.map(decodeURIComponent); } catch { return []; } };

// Shows the view of the address, such as #runs/NAME/OTHER; a malformed address shows the list.
function route() {
  const [view, ...words] = location.hash.slice(1).split("/");
  const chosen = Object.hasOwn(VIEWS, view) ? view : "runs";
  for (const name of Object.keys(VIEWS)) {
    byId(name).hidden = name !== chosen;
    if (name === chosen) byId(`to-${name}`).setAttribute("aria-current", "page");
    else byId(`to-${name}`).removeAttribute("aria-current");
  }
  VIEWS[chosen].open(decoded(words));
  watch(runs.chosen());
}

byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
byId("language").addEventListener("change", (event) => {
  remember("language", event.target.value);
  setLanguage(event.target.value);
  byId("connection").textContent = t(byId("connection").dataset.state ?? "");
  for (const view of Object.values(VIEWS)) view.rebuild();
});
byId("theme").addEventListener("change", (event) => { remember("theme", event.target.value); setTheme(event.target.value); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(byId("theme").value));
document.addEventListener("visibilitychange", () => watch(runs.chosen()));
window.addEventListener("hashchange", route);

byId("language").value = remembered("language", navigator.language.startsWith("zh") ? "zh" : "en");
byId("theme").value = remembered("theme", "auto");
setLanguage(byId("language").value);
setTheme(byId("theme").value);
route();
