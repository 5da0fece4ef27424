// The view of plans: after each change of the form, the planner predicts a run that is not started yet.
import { COLOURS, drawTimeline } from "./charts.js";
import { bytes, duration, figures, h, refusals, remedyText, t, table } from "./words.js";

const byId = (id) => document.getElementById(id);
const GIB = 2 ** 30;
// Fields of the form: name, option, and the option's default; fields after the first FIRST are folded.
const FIELDS = [["model", "model_path", "7b"], ["card", "card", "RTX4090"], ["count", "num_ranks", "2"], ["memory", "host_memory_limit", ""],
  ["sequence", "seq_length", "2048"], ["rows", "batch_size", "32"], ["method", "finetuning_type", "full"],
  ["stages", "num_stages", "auto"], ["chunks", "num_chunks", "auto"], ["states", "optimizer_states", "fp32"],
  ["products", "matmul_dtype", "bf16"], ["disks", "offload_states_to", ""], ["disk_rate", "disk_rate", ""]];
const FIRST = 7;
const CHOICES = { method: ["full", "lora"], states: ["fp32", "bf16", "compact"], products: ["bf16", "fp8", "int8"] };
const NUMBERS = new Set(["count", "memory", "sequence", "rows"]);
const DEFAULTS = { method: "full", states: "fp32", products: "bf16" };
// Words in a command in place of values that only the user knows (mobius/planner/training_command.py).
const BLANKS = ["MODEL", "FOLDER", "DATASET"];
let form = null, names = null, config = null, shown = null, pending = null, timer = null, asked = null;

export async function ask(question, signal) {
  const answer = await fetch("api/plan", { method: "POST", body: JSON.stringify(question), signal });
  return answer.ok ? answer.json() : { problem: await answer.text() };
}

export async function open() {
  if (form) return;
  rebuild();
  tell("starting");
  names = await ask({});
  if (names.problem) return tell(names.problem);
  const kept = values();
  rebuild();
  fill(kept);
  plan();
}

const values = () => Object.fromEntries([...form.elements].filter((element) => element.name).map((element) => [element.name, element.value]));
function fill(kept) { for (const [name, value] of Object.entries(kept)) if (form.elements[name]) form.elements[name].value = value; }
function tell(key, ...more) { byId("verdict").replaceChildren(t(key), ...more); }

export function rebuild() {
  if (byId("plan").hidden && !form) return;
  const kept = form ? values() : {};
  const field = (name, element) => h("label", {}, h("span", {}, t(`plan_${name}`)), element);
  const input = ([name, , value]) => {
    if (CHOICES[name]) return h("select", { name }, CHOICES[name].map((one) => h("option", { value: one, selected: one === value }, t(one))));
    if (name === "card") {
      return h("select", { name }, h("option", { value: "" }, t("plan_here")),
        Object.entries(names?.cards ?? { [value]: 24 }).map(([card, gib]) => h("option", { value: card, selected: card === value }, `${card}, ${gib} GB`)));
    }
    return h("input", { name, value, type: NUMBERS.has(name) ? "number" : "text", min: NUMBERS.has(name) ? "1" : null,
      list: name === "model" ? "models" : null, placeholder: name === "disk_rate" ? "7,2" : null, size: "12" });
  };
  const file = h("input", { type: "file", accept: ".json", id: "config", change: (event) => take(event.target.files[0]) });
  form = h("form", { id: "form", input: later, change: later, submit: (event) => event.preventDefault(),
    dragover: (event) => event.preventDefault(), drop: (event) => { event.preventDefault(); take(event.dataTransfer.files[0]); } },
    h("datalist", { id: "models" }, Object.keys(names?.models ?? {}).map((name) => h("option", { value: name }))),
    FIELDS.slice(0, FIRST).map((one) => field(one[0], input(one))),
    h("details", { id: "rest", open: byId("rest")?.open ?? false }, h("summary", {}, t("plan_rest")), h("div", { class: "fields" },
      FIELDS.slice(FIRST).map((one) => field(one[0], input(one))), field("config", file),
      field("more", h("input", { name: "more", type: "text", placeholder: "--spread_head", autocomplete: "off" })),
      field("tokens", h("input", { name: "tokens", type: "number", min: "0", value: "10000000" })),
      field("price", h("input", { name: "price", type: "number", min: "0", step: "any", value: "" })))));
  byId("form-place").replaceChildren(form);
  fill(kept);
  if (shown) draw(shown);
}

export function redraw() { if (shown && !byId("plan").hidden) draw(shown); }

async function take(file) {
  config = file ? await file.text() : null;
  form.elements.model.disabled = config !== null;
  plan();
}

const split = (text) => (text.match(/"[^"]*"|'[^']*'|\S+/g) ?? []).map((word) => word.replace(/^(["'])(.*)\1$/, "$2"));

function words() {
  const own = values(), found = [];
  for (const [name, option] of FIELDS) {
    const value = own[name]?.trim();
    if (value && !(name === "model" && config !== null) && value !== DEFAULTS[name] && !(name === "disk_rate" && !own.disks.trim())) found.push(`--${option}`, value);
  }
  return [...found, ...split(own.more)];
}

function later(event) {
  if (["tokens", "price"].includes(event.target.name)) return shown && draw(shown);
  clearTimeout(timer);
  if (event.target.id === "config" || JSON.stringify(words()) === asked) return;
  timer = setTimeout(plan, 250);
}

// Asks for a draft, which comes within seconds, and then for the plan that a run would get.
export async function plan() {
  pending?.abort();
  const own = (pending = new AbortController());
  const question = { words: words(), config };
  asked = JSON.stringify(question.words);
  const begun = performance.now();
  const ticking = setInterval(() => tell("planning", ` ${Math.round((performance.now() - begun) / 1000)} s`), 1000);
  byId("plan").setAttribute("aria-busy", "true");
  try {
    for (const isDraft of [true, false]) {
      const found = await ask({ ...question, is_draft: isDraft }, own.signal);
      if (own !== pending) return;
      if (found.is_outdated) { // another tab has asked since
        asked = null;
        return void (shown && draw(shown));
      }
      shown = { ...found, is_draft: isDraft, seconds: (performance.now() - begun) / 1000 };
      draw(shown);
      if (!isDraft || (found.problem && found.fits === undefined)) break;
    }
  } catch (error) {
    if (error.name !== "AbortError") tell("lost");
  } finally {
    clearInterval(ticking);
    if (own === pending) byId("plan").removeAttribute("aria-busy");
  }
}

// Puts options of a remedy into their fields, and options without a field into the field `more`.
function apply(options) {
  const given = split(options);
  for (let index = 0; index < given.length; index += 1) {
    const name = given[index].replace(/^--/, ""), value = given[index + 1]?.startsWith("--") ? undefined : given[index + 1];
    const field = FIELDS.find((one) => one[1] === name)?.[0] ?? { use_lora: "method" }[name];
    if (field) form.elements[field].value = name === "use_lora" ? "lora" : value;
    else {
      const more = split(form.elements.more.value), at = more.indexOf(given[index]);
      if (at >= 0) more.splice(at, more[at + 1]?.startsWith("--") === false ? 2 : 1);
      form.elements.more.value = [...more, given[index], ...(value === undefined ? [] : [value])].join(" ");
    }
    if (value !== undefined) index += 1;
  }
  plan();
}

// Bars of memory by owner, one bar for each row; a mark shows the available memory.
export function memoryBars(title, rows, available) {
  const owners = [...new Set(rows.flatMap(([, parts]) => Object.keys(parts)))];
  const sum = (parts) => Object.values(parts).reduce((total, value) => total + value, 0);
  const most = Math.max(available ?? 0, ...rows.map(([, parts]) => sum(parts)));
  const hue = (owner) => COLOURS[owners.indexOf(owner) % COLOURS.length];
  const label = (owner, value) => `${t(owner)} ${bytes(value)}`;
  const style = (element, styles) => { Object.assign(element.style, styles); return element; };
  return h("figure", { class: "memory" }, h("figcaption", {}, title),
    rows.map(([name, parts]) => h("div", { class: "row" }, h("span", {}, name),
      h("div", { class: "bar", role: "img", "aria-label": `${name}: ${Object.entries(parts).map(([owner, value]) => label(owner, value)).join(", ")}` },
        Object.entries(parts).map(([owner, value]) => style(h("i", { title: label(owner, value) }), { width: `${(100 * value) / most}%`, background: hue(owner) })),
        available ? style(h("b", { title: bytes(available) }), { left: `${(100 * available) / most}%` }) : null),
      h("span", {}, `${bytes(sum(parts))}${available ? ` / ${bytes(available)}` : ""}`))),
    h("p", { class: "owners" }, owners.map((owner) => h("span", {}, style(h("i", {}), { background: hue(owner) }), t(owner)))));
}

// A list of buttons that each change the form, with a text about the change.
const changes = (rows) => h("ul", { class: "remedies" }, rows.map(([options, text]) => h("li", {}, h("button", { type: "button", click: () => apply(options) }, options), " ", text)));

// The planner's refusal; in Chinese, a short translation, with the planner's words folded below it.
function refusalOf(found) {
  const [text] = found.problem.split("\nEach of these"), known = refusals(text);
  if (!known.length) return h("pre", { class: "problem" }, text);
  return h("div", { class: "problem" }, known.map((line) => h("p", {}, line)),
    h("details", {}, h("summary", {}, t("planner_words")), h("pre", {}, text)));
}

function commandOf(command) {
  const blanks = BLANKS.filter((blank) => command.split(" ").includes(blank));
  const marked = command.split(" ").flatMap((word, index) => [index ? " " : "", blanks.includes(word) ? h("mark", {}, word) : word]);
  return [h("div", { class: "command" }, h("pre", { tabindex: "0", id: "command" }, marked),
    h("button", { type: "button", click: (event) => copy(command, event.target) }, t("copy"))),
    blanks.length ? h("p", { class: "quiet" }, t("fill_in"), " ", blanks.map((blank) => t(`blank_${blank}`)).join(" ")) : null];
}

function draw(found) {
  const refused = found.fits === undefined, place = byId("answer");
  tell(refused ? "refused" : found.fits ? "fits" : "fits_not",
    refused ? "" : h("span", { class: "quiet" }, ` ${t(found.is_draft ? "draft" : "final", figures(found.seconds, 2))}`));
  byId("verdict").dataset.fits = String(!!found.fits);
  if (refused) return place.replaceChildren(refusalOf(found), ...(found.advice?.length ? [h("h3", {}, t("advice")), changes(found.advice.map((options) => [options, ""]))] : []));
  const tokens = Number(form.elements.tokens.value), price = Number(form.elements.price.value), speed = found.tokens_per_second;
  const hours = speed && tokens ? tokens / speed / 3600 : null;
  const tiles = [["step_seconds", found.step_seconds && figures(found.step_seconds, 3)], ["tokens_per_second", speed && figures(speed, 3)],
    ["mfu", found.mfu && `${(100 * found.mfu).toFixed(0)} %`], ["limited", found.limited_by && t(found.limited_by)], ["epoch", hours && duration(hours * 3600)],
    ["cost", hours && price ? figures(hours * price, 3) : null], ["model", found.num_parameters?.toLocaleString("en")]];
  const ranks = found.gpu_memory?.ranks ?? [];
  const parts = [h("dl", { class: "tiles" }, tiles.filter(([, value]) => value).map(([key, value]) => h("div", {}, h("dt", {}, t(key)), h("dd", {}, value))))];
  if (!found.fits) parts.push(refusalOf(found));
  const remedies = Object.entries(found.remedies);
  if (remedies.length) parts.push(h("h3", {}, t("remedies")), changes(remedies.map(([options, text]) => [options, remedyText(text)])));
  else if (!found.fits && found.is_draft) parts.push(h("p", { class: "quiet" }, t("searching")));
  if (ranks.length) parts.push(memoryBars(t("gpu_owners"), ranks.map((own, rank) => [t("rank", rank), own]), found.gpu_memory.available));
  if (found.host_memory) parts.push(memoryBars(t("host_owners"), [["", found.host_memory.parts]], found.host_memory.available));
  if (found.disk?.bytes) parts.push(h("p", {}, t("on_disks", bytes(found.disk.bytes), bytes(found.disk.written_per_step))));
  const canvas = h("canvas", { role: "img", "aria-label": t("timeline_predicted") }), note = h("p", { class: "note" });
  if (found.timeline) parts.push(h("h3", {}, t("timeline_predicted")), h("div", { class: "timeline" }, canvas), note, waitsOf(found));
  if (found.fits) parts.push(h("h3", {}, t("command")), ...commandOf(found.command).filter(Boolean));
  if (found.fits && speed && !found.is_draft) parts.push(h("h3", {}, t("faster")), fasterOf(found));
  if (found.details) parts.push(h("details", {}, h("summary", {}, t("details")), h("pre", { tabindex: "0" }, found.details)));
  const isOpen = place.querySelector("details")?.open;
  place.replaceChildren(...parts);
  if (isOpen && place.querySelector("details")) place.querySelector("details").open = true;
  if (found.timeline) drawTimeline(canvas, spansOf(found), found.step_seconds, note);
  return null;
}

export const spansOf = (found) => found.timeline.flatMap((own, rank) => own.filter(([lane]) => lane !== "step").map(([lane, name, start, end]) => [rank, lane, name, start, end - start]));
export const waitsOf = (found) => table(t("waits"), ["", ...Object.keys(found.waits).map((cause) => t(cause)), t("bubble")],
  [[t("waits"), ...Object.values(found.waits).map((seconds) => figures(seconds, 3)), `${(100 * found.bubble).toFixed(0)} %`]]);

async function copy(text, button) {
  try { await navigator.clipboard.writeText(text); } catch { getSelection().selectAllChildren(byId("command")); return; }
  button.textContent = t("copied");
}

// Speeds that the planner predicts for single changes; the page asks for one after the other.
function fasterOf(found) {
  const list = h("ul", { class: "remedies" }), own = values();
  if (found.gain_if_faster) list.append(h("li", {}, t("gain", t(found.limited_by), (100 * found.gain_if_faster).toFixed(1))));
  const count = Number(own.count) || found.num_ranks;
  const tries = [`--num_ranks ${count + 1}`, `--num_ranks ${2 * count}`, `--batch_size ${2 * Number(own.rows || 128)}`, "--matmul_dtype fp8", "--matmul_dtype int8",
    "--optimizer_states bf16", "--spread_head", "--num_chunks auto", ...(own.memory ? [`--host_memory_limit ${2 * Number(own.memory)}`] : [])];
  const button = h("button", { type: "button", id: "faster", click: async () => {
    button.disabled = true;
    const question = { config, is_draft: true }, before = words();
    const base = await ask({ ...question, words: before });
    for (const change of tries) {
      const tried = await ask({ ...question, words: [...before, ...split(change)] });
      if (!list.isConnected || tried.is_outdated) return;
      const gain = tried.fits ? (100 * tried.tokens_per_second) / base.tokens_per_second - 100 : 0;
      if (gain > 1) list.append(h("li", {}, h("button", { type: "button", click: () => apply(change) }, change), ` ${t("more_tokens", gain.toFixed(0), figures(tried.tokens_per_second, 3))}`));
    }
    button.replaceWith(t("tried", tries.length));
  } }, t("try_changes"));
  return h("div", {}, list, button);
}
