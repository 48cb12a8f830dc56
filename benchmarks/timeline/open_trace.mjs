// Opens traces with the viewer of their format's authors (Catapult, once chrome://tracing) in Chromium; see README.md.
//   TRACE_VIEWER=FOLDER node open_trace.mjs TRACE.json... [--out FILE] [--shots FOLDER]
// FOLDER holds trace_viewer_full.html (of torch-tb-profiler on PyPI), and node_modules with playwright-core and webcomponents.js 0.7.
import { createRequire } from "node:module";
import fs from "node:fs";
import path from "node:path";

const folder = process.env.TRACE_VIEWER || process.cwd();
const require = createRequire(path.join(folder, "x.js"));
const { chromium } = require("playwright-core");
const args = process.argv.slice(2);
const option = (name, otherwise) => { const at = args.indexOf(name); return at < 0 ? otherwise : args.splice(at, 2)[1]; };
const out = option("--out"), shots = option("--shots"), binary = option("--chromium", "/usr/bin/chromium");
const FILES = {
  "/": ["text/html", '<!DOCTYPE html><html><head><meta charset="utf-8"><script src="webcomponents.js"></script><link rel="import" href="viewer.html"></head><body style="margin:0;height:100vh"></body></html>'],
  "/webcomponents.js": ["text/javascript", fs.readFileSync(require.resolve("webcomponents.js/webcomponents.min.js"))],
  "/viewer.html": ["text/html", fs.readFileSync(path.join(folder, "trace_viewer_full.html"))],
};
const browser = await chromium.launch({ executablePath: binary, headless: true, args: ["--no-sandbox", "--disable-gpu"] });
const page = await browser.newPage({ viewport: { width: 1280, height: 700 } });
// The viewer is read from files: nothing is asked of a network.
await page.route("**/*", (route) => {
  const found = FILES[new URL(route.request().url()).pathname];
  return found ? route.fulfill({ contentType: found[0], body: found[1] }) : route.abort();
});
const results = [];
for (const file of args) {
  const text = fs.readFileSync(file, "utf8"), events = JSON.parse(text).traceEvents;
  await page.goto("http://viewer.test/");
  await page.waitForFunction(() => window.tr && window.tr.Model && window.tr.importer && window.tr.e && window.tr.e.importer && window.tr.e.importer.TraceEventImporter, null, { timeout: 60000 });
  const read = await page.evaluate(async (json) => {
    window.__hideTraceViewerPolyfillWarning = true;
    const model = new tr.Model();
    await new tr.importer.Import(model).importTracesWithProgressDialog([json]).catch((e) => { throw e; });
    const threads = [];
    for (const process of model.getAllProcesses()) for (const thread of Object.values(process.threads)) {
      threads.push({
        pid: process.pid, process: process.name, tid: thread.tid, name: thread.name,
        slices: thread.sliceGroup.slices.map((s) => [s.title, s.category, s.start, s.duration, s.didNotFinish === true]),
        asynchronous: [...thread.asyncSliceGroup.getDescendantEvents()].map((s) => [s.title, s.category, s.start, s.duration, s.didNotFinish === true]),
      });
    }
    const processAsync = [];
    for (const process of model.getAllProcesses()) for (const s of process.asyncSliceGroup ? process.asyncSliceGroup.getDescendantEvents() : []) processAsync.push([s.title, s.category, s.start, s.duration]);
    const holder = document.createElement("track-view-container"), viewer = document.createElement("tr-ui-timeline-view");
    holder.id = "track_view_container"; viewer.track_view_container = holder; Polymer.dom(viewer).appendChild(holder); viewer.style.height = "100vh";
    document.body.textContent = ""; Polymer.dom(document.body).appendChild(viewer);
    viewer.globalMode = true; viewer.model = model;
    return { warnings: model.importWarnings.map((w) => w.type + ": " + w.message), threads, processAsync, first: model.bounds.min, last: model.bounds.max };
  }, text);
  await page.waitForTimeout(500);
  if (shots) await page.screenshot({ path: path.join(shots, `viewer-${path.basename(path.dirname(path.resolve(file)))}.png`) });
  // Every event of the file is in the viewer's model, on its thread, where it was and as long as it was.
  const problems = read.warnings.map((w) => "warning " + w);
  const complete = events.filter((e) => e.ph === "X"), begins = events.filter((e) => e.ph === "b");
  const names = new Map(events.filter((e) => e.ph === "M" && e.name === "thread_name").map((e) => [`${e.pid}.${e.tid}`, e.args.name]));
  let seen = 0, seenAsync = read.processAsync.length;
  for (const thread of read.threads) {
    const wanted = complete.filter((e) => e.pid === thread.pid && e.tid === thread.tid).sort((a, b) => a.ts - b.ts || b.dur - a.dur);
    const found = thread.slices.slice().sort((a, b) => a[2] - b[2] || b[3] - a[3]);
    seen += found.length; seenAsync += thread.asynchronous.length;
    if (names.has(`${thread.pid}.${thread.tid}`) && names.get(`${thread.pid}.${thread.tid}`) !== thread.name) problems.push(`thread ${thread.pid}.${thread.tid} is called ${thread.name}`);
    if (thread.process !== `rank ${thread.pid}`) problems.push(`process ${thread.pid} is called ${thread.process}`);
    if (found.length !== wanted.length) { problems.push(`thread ${thread.pid}.${thread.tid}: ${found.length} slices for ${wanted.length} events`); continue; }
    found.forEach((slice, i) => {
      const e = wanted[i];  // the viewer counts milliseconds from the first event
      if (Math.abs(slice[2] - e.ts / 1e3) > 2e-6 || Math.abs(slice[3] - e.dur / 1e3) > 2e-6 || slice[4]) problems.push(`event ${e.name} at ${e.ts} is drawn at ${slice[2]} for ${slice[3]}`);
    });
  }
  if (seen !== complete.length) problems.push(`${seen} slices for ${complete.length} events`);
  if (seenAsync < begins.length) problems.push(`${seenAsync} asynchronous slices for ${begins.length} pairs`);
  const row = { trace: path.join(path.basename(path.dirname(path.resolve(file))), path.basename(file)), bytes: text.length, events: events.length, slices: seen, asynchronous: seenAsync, problems: problems.slice(0, 20) };
  results.push(row);
  console.log(JSON.stringify(row));
}
await browser.close();
if (out) fs.writeFileSync(out, JSON.stringify(results, null, 1) + "\n");
process.exit(results.some((one) => one.problems.length) ? 1 : 0);
