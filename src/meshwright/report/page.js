(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const LIGHT = { ink: "#1a1d21", edge: "#d5d9df", lines: ["#0b57a4", "#b14a00", "#1a7a3d", "#8a2a8a", "#7a5b00", "#00707a", "#a3123f", "#4a4f57"], band: "rgba(11,87,164,0.18)" };
  const DARK = { ink: "#e8eaed", edge: "#343b43", lines: ["#6fa8ea", "#f0a35e", "#6fd08c", "#d79ae0", "#e0c060", "#60cfd8", "#ff8fab", "#b3b9c2"], band: "rgba(111,168,234,0.25)" };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  const palette = () => (dark.matches && !printing ? DARK : LIGHT);
  const charts = [];

  // Exponential mean whose weight of the past is s, started without bias; gaps stay gaps.
  function smoothed(values, s) {
    if (!s) return values;
    let mean = 0, weight = 0;
    return values.map((v) => {
      if (v === null) return null;
      mean = s * mean + (1 - s) * v;
      weight = s * weight + (1 - s);
      return mean / weight;
    });
  }

  function numberText(v, unit) {
    if (v === null || v === undefined) return "-";
    const a = Math.abs(v);
    if (unit === "bytes") {
      const names = ["B", "KiB", "MiB", "GiB", "TiB"];
      let i = 0;
      while (v >= 1024 && i < 4) { v /= 1024; i++; }
      return +v.toPrecision(4) + " " + names[i];
    }
    if (unit === "s" && a < 1 && a > 0) return a < 1e-3 ? +(v * 1e6).toPrecision(4) + " us" : +(v * 1e3).toPrecision(4) + " ms";
    if (unit === "s") return +v.toPrecision(4) + " s";
    return a >= 1e6 || (a < 1e-4 && a > 0) ? v.toExponential(2) : String(+v.toPrecision(5));
  }

  function series(line, index) {
    const colour = () => palette().lines[index % palette().lines.length];
    const base = { label: line.label, stroke: colour, spanGaps: !!line.joins, points: { show: false } };
    if (line.kind === "points") return { ...base, width: 1.5, dash: [6, 4], points: { show: true, size: 8, stroke: colour, fill: colour } };
    if (line.kind === "band") return { ...base, stroke: () => palette().lines[0], width: 0.5 };
    return { ...base, width: 1.5, points: { show: line.y.length < 60, size: 4, stroke: colour, fill: colour } };
  }

  function make(figure) {
    const box = document.getElementById(figure.key);
    const holder = box.querySelector(".plot");
    const state = { log: box.querySelector("[data-act=log]").checked, smooth: 0, range: null, plot: null };
    const first = figure.x[0], last = figure.x[figure.x.length - 1];
    const rows = () => [figure.x, ...figure.lines.map((l) => {
      const y = l.kind === "line" ? smoothed(l.y, state.smooth) : l.y;
      return state.log ? y.map((v) => (v !== null && v > 0 ? v : null)) : y;
    })];
    const axis = (more) => ({ stroke: () => palette().ink, grid: { stroke: () => palette().edge, width: 1 }, ticks: { stroke: () => palette().edge, width: 1 }, ...more });
    function draw() {
      if (state.plot) state.plot.destroy();
      const bands = figure.lines.map((l, i) => i).filter((i) => figure.lines[i].kind === "band");
      state.plot = new uPlot({
        width: Math.max(280, holder.clientWidth), height: 260,
        scales: { x: { time: false, range: (u, lo, hi) => (lo === hi ? [lo - 1, hi + 1] : [lo, hi]) }, y: { distr: state.log ? 3 : 1 } },
        axes: [axis({ label: "step", labelSize: 22 }), axis({ size: 76, values: (u, ticks) => ticks.map((v) => (v === null ? "" : numberText(v, figure.unit))) })],
        series: [{ label: "step" }, ...figure.lines.map((l, i) => ({ ...series(l, i), value: (u, v) => numberText(v, figure.unit) }))],
        bands: bands.length === 2 ? [{ series: [bands[0] + 1, bands[1] + 1], fill: () => palette().band }] : [],
        hooks: { setSelect: [(u) => { if (u.select.width > 4) { state.range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]; } }] },
        cursor: { drag: { x: true, y: false } },
      }, rows(), holder);
      if (state.range) state.plot.setScale("x", { min: state.range[0], max: state.range[1] });
    }
    function move(action) {
      let [lo, hi] = state.range || [first, last];
      const width = hi - lo;
      if (action === "all" || width <= 0) { state.range = null; draw(); return; }
      if (action === "in") { lo += width / 4; hi -= width / 4; }
      if (action === "out") { lo -= width / 2; hi += width / 2; }
      const shift = action === "left" ? -width / 4 : action === "right" ? width / 4 : 0;
      const bounded = Math.max(first - lo, Math.min(last - hi, shift));
      if (action === "left" || action === "right") { lo += bounded; hi += bounded; }
      lo = Math.max(first, lo); hi = Math.min(last, hi);
      if (hi - lo < 1) return;
      state.range = lo === first && hi === last ? null : [lo, hi];
      draw();
    }
    box.querySelectorAll("button[data-act]").forEach((b) => b.addEventListener("click", () => move(b.dataset.act)));
    box.querySelector("[data-act=log]").addEventListener("change", (e) => { state.log = e.target.checked; draw(); });
    box.querySelector("[data-act=smooth]").addEventListener("input", (e) => { state.smooth = e.target.value / 100; draw(); });
    holder.addEventListener("dblclick", () => { state.range = null; });
    box.querySelector("details.points").addEventListener("toggle", (e) => {
      const names = ["step", ...figure.lines.map((l) => l.label)];
      if (e.target.open) paged(e.target.querySelector("div"), names, [figure.x, ...figure.lines.map((l) => l.y)], figure.title);
    });
    // Charts far down are drawn when they come near: a report of many runs opens at once.
    const chart = { draw, isDrawn: false, resize: () => state.plot.setSize({ width: Math.max(280, holder.clientWidth), height: 260 }) };
    charts.push(chart);
    new IntersectionObserver((seen, watcher) => {
      if (seen.some((one) => one.isIntersecting)) { watcher.disconnect(); show(chart); }
    }, { rootMargin: "600px" }).observe(box);
  }

  function show(chart) { if (!chart.isDrawn) { chart.isDrawn = true; chart.draw(); } }

  // A table of many rows, a page at a time.
  function paged(holder, names, columns, title) {
    if (holder.firstChild) return;
    const SIZE = 100, count = columns[0].length;
    let page = 0;
    const bar = document.createElement("p"), place = document.createElement("span"), table = document.createElement("table"), wrap = document.createElement("div");
    const which = (holder.closest("section").querySelector("h2, h3").textContent.match(/^\d+: /) || [""])[0];  // of several runs
    wrap.className = "scroll"; wrap.tabIndex = 0; wrap.setAttribute("role", "region"); wrap.setAttribute("aria-label", which + title + ": rows");
    place.setAttribute("aria-live", "polite");
    const button = (text, by) => {
      const b = document.createElement("button");
      b.type = "button"; b.textContent = text;
      b.addEventListener("click", () => { page = Math.max(0, Math.min(Math.ceil(count / SIZE) - 1, page + by)); fill(); });
      return b;
    };
    function fill() {
      const start = page * SIZE, end = Math.min(count, start + SIZE);
      place.textContent = " rows " + (start + 1) + " to " + end + " of " + count + " ";
      const head = table.createTHead(), body = document.createElement("tbody");
      head.textContent = "";
      const top = head.insertRow();
      names.forEach((n) => { const th = document.createElement("th"); th.scope = "col"; th.textContent = n; top.append(th); });
      for (let i = start; i < end; i++) {
        const row = body.insertRow();
        columns.forEach((c) => { row.insertCell().textContent = c[i] === null ? "-" : String(c[i]); });
      }
      if (table.tBodies[0]) table.tBodies[0].remove();
      table.append(body);
    }
    bar.append(button("Previous rows", -1), place, button("Next rows", 1));
    wrap.append(table); holder.append(bar, wrap); fill();
  }

  document.querySelectorAll("details.every").forEach((one) => one.addEventListener("toggle", () => {
    const columns = data.every_step[one.dataset.run];
    if (one.open) paged(one.querySelector("div"), Object.keys(columns), Object.values(columns), "Every step");
  }));
  // A timeline is a picture: it grows as a whole, and its holder scrolls.
  document.querySelectorAll("[data-lanes]").forEach((button) => button.addEventListener("click", () => {
    button.closest("section").querySelectorAll("svg.lanes").forEach((svg) => {
      const factor = button.dataset.lanes === "larger" ? 1.5 : 1 / 1.5, width = Number(svg.getAttribute("width"));
      svg.setAttribute("width", String(Math.round(Math.min(40000, Math.max(300, width * factor)))));
    });
  }));
  data.figures.forEach(make);
  const redraw = () => charts.forEach((c) => { if (c.isDrawn) c.draw(); });
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => charts.forEach((c) => { if (c.isDrawn) c.resize(); }), 100); });
  dark.addEventListener("change", redraw);
  addEventListener("beforeprint", () => { printing = true; charts.forEach(show); redraw(); });
  addEventListener("afterprint", () => { printing = false; redraw(); });
})();
