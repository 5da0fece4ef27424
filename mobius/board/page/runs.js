// The view of runs: the list, and one run or two side by side.
import { COLOURS, Chart, drawTimeline, smooth } from "./charts.js";
import { ask, spansOf, waitsOf } from "./plan.js";
import { bytes, duration, figures, h, refusals, remedyText, t, table } from "./words.js";

const byId = (id) => document.getElementById(id);
const GIB = 2 ** 30, POINTS = 1000, RECENT = 40;
const rows = new Map(), details = new Map(), files = new Map();
const settings = { axis: "step", smoothing: 0.6, logarithmic: false, range: null };
let names = [], sections = null, charts = null, parts = null;

const fetched = async (path) => { const answer = await fetch(path); return answer.ok ? answer.json() : null; };
const query = (path, name) => `api/${path}?run=${encodeURIComponent(name)}`;
const textOf = async (name, file) => { const answer = await fetch(`${query("file", name)}&file=${file}`); return answer.ok ? answer.text() : ""; };
const parsed = (text) => { try { return JSON.parse(text); } catch { return null; } };
const address = (...chosen) => `#runs/${chosen.map(encodeURIComponent).join("/")}`;

export const chosen = () => names;

export function open(words) {
  const wanted = [...new Set(words)].slice(0, 2);
  if (JSON.stringify(wanted) === JSON.stringify(names) && parts) return;
  names = wanted;
  settings.range = sections = null;
  for (const name of details.keys()) if (!names.includes(name)) details.delete(name);
  rebuild();
}

export function rebuild() {
  for (const chart of Object.values(charts ?? {})) chart.remove();
  charts = null;
  parts = buildRun();
  byId("run").replaceChildren(...(parts?.all ?? [h("p", { class: "quiet" }, t(rows.size ? "pick" : "none"))]));
  drawList();
  redraw();
}

export function takeRows({ rows: changed, gone }) {
  for (const name of gone) rows.delete(name);
  for (const row of changed) {
    const before = rows.get(row.id)?.state;
    if (before && before !== row.state) byId("announcement").textContent = t("now", row.id, t(row.state));
    if (before !== row.state && names.includes(row.id)) loadFiles(row.id);
    rows.set(row.id, row);
  }
  if (!names.length && rows.size && !byId("runs").hidden) location.replace(address([...rows.values()].sort((a, b) => b.modified - a.modified)[0].id));
  drawList();
  drawHead();
}

// Takes new data of a run: appends them to the run's columns, or replaces the columns.
export function takeRun(news) {
  if (!names.includes(news.id)) return;
  const before = details.get(news.id);
  if (!news.is_whole && before) {
    const length = before.series.step.length;
    for (const name of new Set([...Object.keys(before.series), ...Object.keys(news.series)])) {
      const own = name.replace(/:(min|max)$/, "");
      const more = news.series[name] ?? news.series[own] ?? news.series.step.map(() => null);
      news.series[name] = [...(before.series[name] ?? Array(length).fill(null)), ...more];
    }
    if (news.series.step.length > 3 * POINTS) { // the board sends all steps again, as fewer points
      fetched(`${query("section", news.id)}&first=0&last=1e15`).then((whole) => {
        if (whole && details.has(news.id)) details.get(news.id).series = whole.series;
      });
    }
  }
  details.set(news.id, news);
  if (!files.has(news.id)) loadFiles(news.id);
  redraw();
}

async function loadFiles(name) {
  files.set(name, files.get(name) ?? {});
  const [plan, predict, options, answers, trace] = await Promise.all(
    ["plan.json", "predict_results.json", "training_args.yaml", "generated_predictions.jsonl", "trace.json"].map((file) => textOf(name, file)));
  files.set(name, { plan: parsed(plan), predict: parsed(predict), options, trace: parsed(trace),
    answers: answers.split("\n").slice(0, 50).map(parsed).filter(Boolean) });
  if (!parts) return;
  drawFolds();
  drawRest();
}

function drawList() {
  const wanted = byId("filter").value.trim().toLowerCase();
  const shown = [...rows.values()].filter((row) => `${row.id} ${t(row.state)} ${row.state}`.toLowerCase().includes(wanted));
  shown.sort((one, other) => other.modified - one.modified || one.id.localeCompare(other.id));
  byId("none").hidden = rows.size > 0;
  const focused = document.activeElement?.closest("#list a")?.getAttribute("href");
  byId("list").replaceChildren(...shown.map((row) => h("li", {},
    h("a", { href: address(row.id), "aria-current": names.includes(row.id) ? "true" : null, class: row.state },
      h("span", { class: "name" }, row.id), h("span", { class: `badge ${row.state}` }, t(row.state).split(/[:,：，]/)[0]),
      h("progress", { max: row.num_steps ?? 1, value: row.num_steps ? row.step : 0, "aria-label": place(row) }),
      h("span", { class: "quiet" }, `${place(row)} · ${t("short_loss")} ${figures(row.loss)}${row.left ? ` · ${duration(row.left[0])}` : ""}`)))));
  if (focused) [...byId("list").querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
}

const place = (row) => (row.num_steps ? t("progress", row.step, row.num_steps) : t("step_only", row.step));

function buildRun() {
  if (!names.length) return null;
  const zoom = (range) => { settings.range = range; loadSections(); redraw(); };
  charts = {};
  const grid = h("div", { class: "charts" });
  const add = (key, title, before) => { charts[key] = new Chart(t(title), zoom); grid.insertBefore(charts[key].root, before ?? null); };
  for (const [key, title] of [["loss", "loss"], ["tokens", "tokens_per_second"], ["norm", "grad_norm"], ["rate", "learning_rate"],
    ["seconds", "step_seconds"], ["waits", "waits"], ["gpu", "gpu"], ["host", "host"]]) add(key, title);
  const control = (label, element) => h("label", {}, h("span", {}, t(label)), element);
  const changed = (key, read) => (event) => { settings[key] = read(event.target); settings.range = sections = null; redraw(); };
  const option = (value, text, current) => h("option", { value, selected: value === current }, text);
  const compare = h("select", { id: "compare", change: (event) => { location.hash = address(names[0], ...(event.target.value ? [event.target.value] : [])); } });
  const controls = h("div", { class: "controls" },
    control("compare", compare),
    control("axis", h("select", { id: "axis", change: changed("axis", (target) => target.value) },
      option("step", t("axis_step"), settings.axis), option("time", t("axis_time"), settings.axis))),
    control("smoothing", h("input", { id: "smoothing", type: "range", min: "0", max: "0.98", step: "0.02", value: String(settings.smoothing),
      input: (event) => { settings.smoothing = Number(event.target.value); redraw(); } })),
    control("logarithmic", h("input", { id: "logarithmic", type: "checkbox", checked: settings.logarithmic, change: changed("logarithmic", (target) => target.checked) })),
    h("button", { id: "whole", type: "button", click: () => zoom(null) }, t("whole")));
  const made = { compare, heads: h("div", { class: "pair" }), where: h("div", { class: "pair" }), lines: h("div", { class: "pair" }),
    against: h("div", {}), rest: h("div", { class: "pair" }), addChart: (key, title) => add(key, title, charts.tokens.root) };
  made.all = [made.heads, controls, grid,
    section("where", h("p", { class: "quiet" }, t("where_text")), made.where), section("against", made.against),
    section("timeline", made.lines), made.rest];
  return made;
}

const section = (title, ...children) => h("section", {}, h("h3", {}, t(title)), ...children);
const fold = (title, count, ...children) => h("details", {}, h("summary", {}, `${t(title)} (${count})`), ...children);

function drawHead() {
  if (!parts) return;
  const others = [...rows.keys()].filter((name) => name !== names[0]).sort();
  const wanted = JSON.stringify([others, names[1]]);
  if (parts.compare.dataset.shown !== wanted) {
    parts.compare.replaceChildren(h("option", { value: "" }, t("nothing")), ...others.map((name) => h("option", { value: name, selected: name === names[1] }, name)));
    parts.compare.dataset.shown = wanted;
  }
  parts.heads.replaceChildren(...names.map((name, index) => {
    const row = rows.get(name), told = details.get(name), start = told?.start ?? {};
    if (!row) return h("article", {}, h("h2", {}, name));
    const tiles = [["median_loss", figures(row.loss)], ["eval_loss", figures(row.eval_loss)], ["tokens_per_second", figures(row.tokens_per_second, 3)],
      ["step_seconds", figures(row.step_seconds, 3)], ["gpu", figures(row.peak_gpu_memory_gib, 3)], ["host", figures(row.peak_host_memory_gib, 3)],
      ["model", start.num_parameters?.toLocaleString("en")], ["batch", start.batch_size && `${start.batch_size} × ${start.seq_length}`],
      ["device", start.device && `${start.device} × ${start.num_ranks}${start.num_replicas > 1 ? ` × ${start.num_replicas}` : ""}`]];
    return h("article", {},
      h("h2", {}, names.length > 1 ? h("i", { class: `key key${index}` }) : null, name, " ", h("span", { class: `badge ${row.state}` }, t(row.state))),
      h("p", { class: "place" }, place(row), row.left ? `, ${t("left", ...row.left.map(duration))}` : "", start.step ? `, ${t("resumed", start.step)}` : ""),
      told?.num_steps && !start.plan ? h("p", { class: "note" }, t("foreign")) : null,
      told?.num_unread ? h("p", { class: "note" }, t("unread", told.num_unread)) : null,
      h("dl", { class: "tiles" }, tiles.filter(([, value]) => value && value !== "–").map(([key, value]) => h("div", {}, h("dt", {}, t(key)), h("dd", {}, value)))));
  }));
}

export function redraw() {
  if (!parts) return;
  drawHead();
  drawCharts();
  drawWhere();
  drawRest();
}

async function loadSections() {
  const range = settings.range;
  sections = null;
  if (!range) return;
  const found = await Promise.all(names.map((name) => {
    const told = details.get(name), x = told ? axisOf(told.series, told) : [];
    const inside = x.map((value, index) => [value, told.series.step[index]]).filter(([value]) => value >= range[0] && value <= range[1]).map(([, step]) => step);
    if (!inside.length) return null;
    const width = (told.num_steps / Math.max(1, told.series.step.length));
    return fetched(`${query("section", name)}&first=${inside[0] - width}&last=${inside[inside.length - 1] + width}`);
  }));
  if (settings.range !== range) return;
  sections = Object.fromEntries(names.map((name, index) => [name, found[index]?.series]));
  drawCharts();
}

const hours = (time, told) => (Number.isFinite(time) ? (time - (Number.isFinite(told.start.time) ? told.start.time : told.series.time[0])) / 3600 : NaN);
const axisOf = (series, told) => (settings.axis === "step" || series.time[0] === null ? series.step : series.time.map((time) => hours(time, told)));

// The numbers of the objective that a run has: columns that no other chart shows.
const MEASURED = new Set(["step", "time", "loss", "aux_loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds", "peak_gpu_memory_gib", "peak_host_memory_gib"]);
const numbersOf = (series) => Object.keys(series).filter((key) => !MEASURED.has(key) && !key.startsWith("wait/") && !key.includes(":"));
// The chart of a number: shares have one of their own, since rewards are much larger or smaller.
const groupOf = (number) => `numbers/${number.endsWith("/accuracies") ? number : number.split("/")[0]}`;

function drawCharts() {
  const groups = names.flatMap((name) => numbersOf(details.get(name)?.series ?? {})).map(groupOf);
  for (const group of new Set(groups)) if (!charts[group]) parts.addChart(group, group.slice("numbers/".length));
  const lines = Object.fromEntries(Object.keys(charts).map((key) => [key, []]));
  const multiple = names.length > 1;
  names.forEach((name, index) => {
    const told = details.get(name);
    if (!told?.series.step.length) return;
    const series = sections?.[name] ?? told.series, x = axisOf(series, told), colour = COLOURS[index];
    const label = (text) => (multiple ? `${name} ${text}` : text);
    const band = (key) => (multiple || !series[`${key}:min`] ? {} : { low: series[`${key}:min`], high: series[`${key}:max`] });
    const line = (key, more = {}) => ({ name: label(t(key)), x, y: series[key], colour, ...more });
    const level = (value, text) => (Number.isFinite(value) && value > 0 ? [{ name: label(t(text)), x: [x[0], x[x.length - 1]], y: [value, value], colour, dash: [6, 4] }] : []);
    lines.loss.push(line("loss", { ...band("loss"), colour: `${colour}${settings.smoothing ? "66" : ""}` }));
    if (settings.smoothing) lines.loss.push({ ...line("loss"), name: label(t("smoothed")), y: smooth(series.loss ?? [], settings.smoothing), width: 2 });
    const evaluated = (key, text, hue) => {
      const measured = told.evaluations.filter((one) => Number.isFinite(one.numbers?.[key]));
      return measured.length ? [{ name: label(text), x: measured.map((one) => (settings.axis === "step" ? one.step : hours(one.time, told))),
        y: measured.map((one) => one.numbers[key]), colour: COLOURS[hue], points: true }] : [];
    };
    lines.loss.push(...evaluated("loss", t("eval_loss"), index + 2));
    for (const key of numbersOf(series)) {
      const group = lines[groupOf(key)], hue = group.length % COLOURS.length;
      group.push({ ...line(key), colour: COLOURS[hue] }, ...evaluated(key, `${t("evaluation")}: ${t(key)}`, (hue + 1) % COLOURS.length));
    }
    lines.tokens.push(line("tokens_per_second", band("tokens_per_second")));
    lines.norm.push(line("grad_norm", band("grad_norm")));
    lines.rate.push(line("learning_rate"));
    lines.seconds.push(line("step_seconds", band("step_seconds")), ...level(told.start.predicted_step_seconds, "predicted"));
    const causes = Object.keys(series).filter((key) => key.startsWith("wait/"));
    causes.forEach((key, number) => lines.waits.push({ ...line(key), name: label(t(key.slice(5))), colour: COLOURS[(number + 3 * index) % COLOURS.length], dash: index ? [5, 3] : undefined }));
    lines.gpu.push(line("peak_gpu_memory_gib"), ...level(told.start.planned_gpu_bytes / GIB, "planned"));
    lines.host.push(line("peak_host_memory_gib"), ...level(told.start.planned_host_bytes / GIB, "planned"));
  });
  byId("whole").disabled = !settings.range;
  for (const [key, chart] of Object.entries(charts)) {
    chart.show(lines[key], { logarithmic: key === "loss" && settings.logarithmic, range: settings.range, axis: `axis_${settings.axis}` });
  }
}

const median = (values) => {
  const known = (values ?? []).filter((value) => value !== null && value !== undefined).sort((one, other) => one - other);
  return known.length ? known[Math.floor(known.length / 2)] : null;
};
const recent = (series, key) => median(series[key]?.slice(-RECENT));

function bars(pairs) {
  const parts = pairs.filter(([, value]) => Number.isFinite(value));
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  return h("ul", { class: "bars" }, parts.map(([name, value], index) => h("li", {}, h("span", {}, name),
    h("meter", { min: 0, max: total, value, class: `hue${index}`, "aria-label": name }),
    h("span", {}, `${figures(value, 3)} s · ${((100 * value) / total).toFixed(0)} %`))));
}

function drawWhere() {
  parts.where.replaceChildren(...names.map((name) => {
    const told = details.get(name), total = told && recent(told.series, "step_seconds");
    if (!total) return h("p", {}, "–");
    const waits = Object.keys(told.series).filter((key) => key.startsWith("wait/")).map((key) => [t("wait", t(key.slice(5))), recent(told.series, key) ?? 0]);
    const waited = waits.reduce((sum, [, value]) => sum + value, 0);
    return h("div", {}, multipleTitle(name), bars([[t("compute"), Math.max(0, total - waited)], ...waits]));
  }));
  const shown = names.flatMap((name) => {
    const told = details.get(name), start = told?.start ?? {}, series = told?.series ?? {};
    const pairs = [["step_seconds", start.predicted_step_seconds, recent(series, "step_seconds")],
      ["gpu", start.planned_gpu_bytes && start.planned_gpu_bytes / GIB, median(series.peak_gpu_memory_gib?.slice(-1))],
      ["host", start.planned_host_bytes && start.planned_host_bytes / GIB, median(series.peak_host_memory_gib?.slice(-1))]];
    return pairs.filter(([, planned, measured]) => planned && measured).map(([key, planned, measured]) => [
      `${names.length > 1 ? `${name}: ` : ""}${t(key)}${key === "step_seconds" && start.bottleneck ? ` (${t("limited")} ${t(start.bottleneck)})` : ""}`,
      figures(planned), figures(measured), `${((100 * measured) / planned - 100).toFixed(1)} %`]);
  });
  parts.against.replaceChildren(shown.length ? table(t("against"), ["", t("planned"), t("measured"), t("difference")], shown) : h("p", {}, "–"));
}

const multipleTitle = (name) => (names.length > 1 ? h("h4", {}, name) : null);

// Redraws only the parts whose data have changed, so that a prediction stays; open folds stay open.
function drawRest() {
  const told = names.map((name) => details.get(name));
  const isNew = (element, facts) => { const text = JSON.stringify(facts), before = element.dataset.shown; element.dataset.shown = text; return text !== before; };
  if (isNew(parts.rest, told.map((one) => one && [one.evaluations.length, one.warnings.length, one.checkpoints.length, one.start.time]))) drawFolds();
  if (isNew(parts.lines, told.map((one, index) => one && [one.start.time, !!files.get(names[index])?.trace]))) drawLines();
}

function drawFolds() {
  const own = (summary) => summary.textContent.replace(/\(.*/, "");
  const opened = new Set([...parts.rest.querySelectorAll("details[open] > summary")].map(own));
  parts.rest.replaceChildren(...names.map((name) => h("div", {}, multipleTitle(name), foldsOf(details.get(name), files.get(name) ?? {}))));
  for (const summary of parts.rest.querySelectorAll("summary")) summary.parentElement.open = opened.has(own(summary));
}

function foldsOf(told, own) {
  if (!told) return [];
  const { evaluations, warnings, checkpoints } = told, folds = [];
  if (warnings.length) folds.push(fold("warnings", warnings.length, h("ul", {}, warnings.map((one) => h("li", {}, `${t("step_only", one.step)}: ${one.text}`)))));
  if (evaluations.length) {
    const known = ["perplexity", "token_accuracy", "rewards/accuracies", "rewards/margins", "accuracy", "margin"].filter((key) => evaluations.some((one) => Number.isFinite(one.numbers?.[key])));
    const cells = (one) => ["loss", ...known].map((key) => figures(one.numbers?.[key]));
    folds.push(fold("evaluations", evaluations.length, table(t("evaluations"), [t("step"), t("eval_loss"), ...known.map((key) => t(key)), t("samples")],
      evaluations.slice(-100).reverse().map((one) => [one.step, ...cells(one), figures(one.num_samples)]))));
  }
  if (own.answers?.length) {
    const scores = Object.entries(own.predict ?? {}).map(([key, value]) => `${key.replace("predict_", "").replaceAll("_", " ")} ${figures(value)}`).join(", ");
    folds.push(fold("answers", own.answers.length, h("p", { class: "quiet" }, scores), table(t("answers"), [t("prompt"), t("answer"), t("label")],
      own.answers.map((one) => [h("pre", {}, one.prompt), h("pre", {}, one.predict), h("pre", {}, one.label)]))));
  }
  if (checkpoints.length) {
    folds.push(fold("checkpoints", checkpoints.length, table(t("checkpoints"), [t("step"), t("path"), t("bytes"), t("seconds")],
      checkpoints.map((one) => [one.step, one.path, bytes(one.num_bytes), figures(one.seconds, 3)]))));
  }
  if (told.start.startup_seconds) folds.push(fold("startup", Object.keys(told.start.startup_seconds).length, bars(Object.entries(told.start.startup_seconds).map(([part, value]) => [t(part === "planning" ? "planning_part" : part), value]))));
  if (Array.isArray(own.plan?.cuts)) {
    const resident = new Set([].concat(own.plan.resident ?? []));
    folds.push(fold("plan_file", own.plan.cuts.length, h("p", {}, told.start.plan), table(t("stages"), [t("stages"), t("rank", ""), t("layers"), t("place")],
      own.plan.cuts.filter(Boolean).map((one) => [one.stage, one.stage % own.plan.num_ranks, `${one.first_layer} – ${one.end_layer}`, t(resident.has(one.stage) ? "resident" : "streamed")]))));
  }
  if (own.options) folds.push(fold("options", own.options.split("\n").filter((line) => line.includes(":")).length, h("pre", { tabindex: "0" }, own.options)));
  return folds;
}

function drawLines() {
  parts.lines.replaceChildren(...names.map((name) => {
    const box = h("div", {}), told = timelineOf(files.get(name)?.trace);
    box.append(told ? "" : h("p", { class: "quiet" }, t("no_timeline")));
    if (told) requestAnimationFrame(() => drawTrace(box, name, told.steps[Math.min(1, told.steps.length - 1)]));
    return h("div", {}, ...[multipleTitle(name)].filter(Boolean), box, predictionOf(name));
  }));
}

// The planner's step for a run with the same options on the same cards, after the user asks for it.
function predictionOf(name) {
  const start = details.get(name)?.start ?? {}, box = h("div", {});
  if (!start.device || start.device === "cpu") return box;
  const plain = (text) => text.toLowerCase().replace(/[^a-z0-9]/g, "");
  const button = h("button", { type: "button", class: "ask", click: async () => {
    button.disabled = true;
    const cards = Object.keys((await ask({})).cards ?? {}).filter((card) => plain(start.device).includes(plain(card)));
    const card = cards.sort((one, other) => other.length - one.length)[0];
    const found = await ask({ run: name, words: [...(card ? ["--card", card] : []), "--num_ranks", String(start.num_ranks)] });
    button.disabled = false;
    if (!found.timeline) return box.replaceChildren(button, h("p", { class: "note" }, found.problem ? [...refusals(found.problem), found.problem].join(" ") : t("no_prediction")));
    const canvas = h("canvas", { role: "img", "aria-label": t("timeline_predicted") }), note = h("p", { class: "note" });
    box.replaceChildren(h("h4", {}, `${t("timeline_predicted")}: ${figures(found.step_seconds, 3)} s`), h("div", { class: "timeline" }, canvas), note, waitsOf(found),
      h("p", {}, t("gain", t(found.limited_by), (100 * found.gain_if_faster).toFixed(1))), ...Object.entries(found.remedies).map(([options, text]) => h("p", {}, h("code", {}, options), ` ${remedyText(text)}`)));
    return drawTimeline(canvas, spansOf(found), found.step_seconds, note);
  } }, t("ask_planner"));
  box.append(button);
  return box;
}

// Spans of a Chrome trace by step; null for anything else.
function timelineOf(trace) {
  try {
    const spans = trace.traceEvents.filter((event) => event.ph === "X" && Number.isFinite(event.ts) && Number.isFinite(event.dur));
    const whole = spans.filter((event) => event.cat === "step");
    const steps = [...new Set(whole.map((event) => event.args.step))].sort((one, other) => one - other);
    return steps.length ? { spans, whole, steps } : null;
  } catch { return null; }
}

function drawTrace(box, name, step) {
  const { spans, whole, steps } = timelineOf(files.get(name).trace);
  const own = whole.filter((event) => event.args.step === step);
  const start = Math.min(...own.map((event) => event.ts)), end = Math.max(...own.map((event) => event.ts + event.dur));
  const shown = [], ranks = new Map(), lanes = new Set();
  for (const event of spans) {
    const from = Math.max(event.ts, start), to = Math.min(event.ts + event.dur, end);
    if (event.cat === "step" || from >= to) continue;
    const lane = event.cat === "wait" ? t("wait", t(event.name)) : t(`lane_${event.cat}`), sums = ranks.get(event.pid) ?? {};
    sums[lane] = (sums[lane] ?? 0) + (to - from) / 1e6;
    ranks.set(event.pid, sums);
    lanes.add(lane);
    shown.push([event.pid, event.cat, event.name, (from - start) / 1e6, (to - from) / 1e6]);
  }
  const canvas = h("canvas", { role: "img", "aria-label": t("timeline") }), note = h("p", { class: "note" });
  const choice = h("select", { change: (event) => drawTrace(box, name, Number(event.target.value)) },
    steps.map((one) => h("option", { value: String(one), selected: one === step }, one)));
  box.replaceChildren(...[h("label", {}, h("span", {}, t("step")), choice), h("div", { class: "timeline" }, canvas), note,
    table(t("per_rank"), [t("per_rank"), ...lanes], [...ranks].sort().map(([rank, sums]) => [t("rank", rank), ...[...lanes].map((lane) => figures(sums[lane] ?? 0, 3))]))].filter(Boolean));
  drawTimeline(canvas, shown, (end - start) / 1e6, note);
}

byId("filter").addEventListener("input", drawList);
