// Charts over steps, which zoom together, and the timeline of a step.
/* global uPlot */
import { figures, h, t } from "./words.js";

export const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999933"];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Moving average whose weight of the past is `share`; gaps stay gaps.
export function smooth(values, share) {
  let last = null;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    last = last === null ? value : share * last + (1 - share) * value;
    return last;
  });
}

// The line as uPlot can draw it: x finite and rising, y finite or null.
function sound(line) {
  const order = line.y ? [...line.x.keys()].filter((place) => Number.isFinite(line.x[place])) : [];
  if (order.some((place, index) => index && line.x[place] < line.x[order[index - 1]])) order.sort((one, other) => line.x[one] - line.x[other]);
  const own = (value) => { const short = typeof value === "number" ? Math.fround(value) : NaN; return Number.isFinite(short) ? short : null; };
  const pick = (values) => values && order.map((place) => own(values[place]));
  return { ...line, x: order.map((place) => line.x[place]), y: pick(line.y) ?? [], low: pick(line.low), high: pick(line.high) };
}

// A range that is wide enough for tick marks: if two marks round to the same number, uPlot creates marks without end.
function span([low, high], least) {
  const missing = Math.max(least, 1e-9 * Math.max(Math.abs(low), Math.abs(high))) - (high - low);
  return missing > 0 ? [low - missing / 2, high + missing / 2] : [low, high];
}

// A figure whose `show` takes lines {name, x, y, colour, dash, width, points, low, high}; `onZoom` gets a range of x.
export class Chart {
  constructor(title, onZoom) {
    this.title = title;
    this.onZoom = onZoom;
    this.latest = h("span", { class: "latest" });
    this.box = h("div", { class: "chart", role: "img", tabindex: "0", keydown: (event) => this.key(event) });
    this.rows = h("div", {});
    this.details = h("details", { toggle: () => this.tabulate() }, h("summary", {}, t("numbers")), this.rows);
    this.root = h("figure", {}, h("figcaption", {}, title, " ", this.latest), this.box, this.details);
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.box);
    this.index = null;
  }

  show(lines, { logarithmic = false, range = null, axis = "axis_step" } = {}) {
    lines = lines.map(sound).filter((line) => line.y.some((value) => value !== null));
    this.root.hidden = !lines.length;
    if (!lines.length) return;
    const shape = JSON.stringify([lines.map((line) => [line.name, line.colour, !!line.low]), logarithmic, axis, css("--ink")]);
    const tables = lines.map((line) => [line.x, line.y, ...(line.low ? [line.low, line.high] : [])]);
    const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
    if (shape === this.shape && this.plot) {
      this.plot.setData(data, false);
    } else {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(lines, logarithmic, axis), data, this.box);
      this.shape = shape;
    }
    const x = this.plot.data[0];
    const [min, max] = (this.range = span(range ?? [x[0], x[x.length - 1]], axis === "axis_step" ? 1 : 1 / 3600));
    this.plot.setScale("x", { min, max });
    this.describe(lines[0], axis);
    if (this.details.open) this.tabulate();
  }

  options(lines, logarithmic, axis) {
    const series = [{ label: t(axis), value: (_, value) => figures(value, 6) }];
    const bands = [];
    for (const line of lines) {
      const own = { stroke: line.colour, dash: line.dash, width: line.width ?? 1.5, spanGaps: true };
      const points = line.points ? { show: true, size: 7, fill: line.colour } : { show: false };
      series.push({ label: line.name, ...own, points, value: (_, value) => figures(value) });
      if (line.low) {
        const edge = { label: "", stroke: "transparent", spanGaps: true, points: { show: false } };
        bands.push({ series: [series.length + 1, series.length], fill: `${line.colour}33` });
        series.push({ ...edge, class: "edge" }, { ...edge, class: "edge" });
      }
    }
    const look = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
    return {
      ...this.size(), series, bands,
      scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1 } },
      axes: [{ ...look, size: 28 }, { ...look, size: 62, values: (_, values) => values.map((value) => (value === null ? "" : figures(value))) }],
      cursor: { drag: { x: true, y: false, setScale: false } },
      hooks: { setSelect: [(plot) => this.selected(plot)] },
    };
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.onZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  size() {
    return { width: Math.max(this.box.clientWidth, 200), height: 190 };
  }

  fit() {
    if (this.plot && this.box.clientWidth && this.box.clientWidth !== this.plot.width) this.plot.setSize(this.size());
  }

  describe(line, axis) {
    const known = line.y.filter((value) => value !== null);
    const at = line.y.lastIndexOf(known[known.length - 1]);
    const [least, most] = known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    const last = figures(known[known.length - 1]);
    this.latest.textContent = last;
    this.box.setAttribute("aria-label", t("chart", this.title, last, `${t(axis)} ${figures(line.x[at], 6)}`, figures(least), figures(most)));
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !this.plot) return;
    event.preventDefault();
    const x = this.plot.data[0], last = x.length - 1;
    this.index = Math.max(0, Math.min(last, (this.index ?? last) + moves[event.key] * (event.shiftKey ? 20 : 1)));
    this.plot.setCursor({ left: this.plot.valToPos(x[this.index], "x"), top: 20 });
    const told = this.plot.series.slice(1).map((series, number) => [series.label, this.plot.data[number + 1][this.index]])
      .filter(([label, value]) => label && value !== null && value !== undefined);
    document.getElementById("announcement").textContent =
      `${figures(x[this.index], 6)}: ${told.map(([label, value]) => `${label} ${figures(value)}`).join(", ")}`;
  }

  tabulate() {
    if (!this.details.open || !this.plot) return;
    const named = this.plot.series.map((series, index) => [series.label, index]).filter(([label]) => label);
    const [min, max] = this.range;
    const rows = [...this.plot.data[0].keys()].filter((row) => this.plot.data[0][row] >= min && this.plot.data[0][row] <= max).slice(-20).reverse();
    this.rows.replaceChildren(h("table", {},
      h("thead", {}, h("tr", {}, named.map(([label]) => h("th", { scope: "col" }, label)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, named.map(([, index]) => h("td", {}, figures(this.plot.data[index][row], 6))))))));
  }

  remove() {
    this.observer.disconnect();
    this.plot?.destroy();
  }
}

const LANES = ["compute", "wait", "load", "offload", "offload_activations", "prefetch_activations", "send", "receive", "optimizer",
  "reduce", "gather"];
const HUES = { F: "#0072b2", B: "#009e73", H: "#8c6bb1", wait: "#d9534f", load: "#e69f00", offload: "#cc79a7", optimizer: "#999933" };

// Draws spans [rank, lane, name, start, seconds] of one step, with a row for each lane of each rank, `seconds` wide.
export function drawTimeline(canvas, spans, seconds, note) {
  const rows = new Map();
  const key = (rank, lane) => rank * 100 + LANES.indexOf(lane);
  for (const [rank, lane] of spans) rows.set(key(rank, lane), [rank, lane]);
  const order = [...rows.keys()].sort((one, other) => one - other);
  const place = new Map(order.map((row, index) => [row, index]));
  const ratio = window.devicePixelRatio || 1, width = canvas.parentElement.clientWidth, tall = 15, margin = 128;
  canvas.width = width * ratio;
  canvas.height = (order.length * tall + 18) * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  const x = (time) => margin + (time / seconds) * (width - margin - 4);
  for (const row of order) {
    const [rank, lane] = rows.get(row), top = place.get(row) * tall;
    pen.fillStyle = css("--quiet");
    pen.fillText(`${rank} ${t(`lane_${lane}`)}`, 2, top + 11, margin - 6);
    pen.fillStyle = css("--line");
    pen.fillRect(margin, top + tall - 1, width - margin - 4, 0.5);
  }
  for (const [rank, lane, name, start, length] of spans) {
    pen.fillStyle = HUES[lane === "compute" ? name[0] : lane] ?? "#56b4e9";
    pen.fillRect(x(start), place.get(key(rank, lane)) * tall + 1, Math.max(0.7, x(start + length) - x(start) - 0.3), tall - 3);
  }
  pen.fillStyle = css("--quiet");
  for (let mark = 0; mark <= 4; mark += 1) {
    pen.textAlign = mark === 4 ? "right" : "left";
    pen.fillText(`${figures((seconds * mark) / 4, 3)} s`, x((seconds * mark) / 4), order.length * tall + 13);
  }
  canvas.onmousemove = (event) => {
    const row = order[Math.floor(event.offsetY / tall)], time = ((event.offsetX - margin) / (width - margin - 4)) * seconds;
    const found = spans.find(([rank, lane, , start, length]) => key(rank, lane) === row && start <= time && time <= start + length);
    note.textContent = found ? `${t("rank", found[0])} ${t(`lane_${found[1]}`)} ${t(found[2])}: ${figures(found[4] * 1000)} ms` : "";
  };
}
