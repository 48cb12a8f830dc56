// Opens reports in Chromium and checks them; see README.md. Needs playwright-core and axe-core beside it or in NODE_PATH.
//   node check.mjs REPORT.html... --out results/browser.json [--shots FOLDER] [--chromium /usr/bin/chromium]
import { createRequire } from "node:module";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";

const require = createRequire(path.join(process.env.REPORT_CHECK_MODULES || process.cwd(), "x.js"));
const { chromium } = require("playwright-core");
const axe = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const args = process.argv.slice(2);
const option = (name, otherwise) => { const at = args.indexOf(name); return at < 0 ? otherwise : args.splice(at, 2)[1]; };
const out = option("--out"), shots = option("--shots"), binary = option("--chromium", "/usr/bin/chromium");
if (!args.length) { console.error("no report given"); process.exit(2); }

const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const results = [];
let failed = false;

for (const file of args) {
  for (const scheme of ["light", "dark"]) {
    for (const width of [1280, 390]) {
      const profile = fs.mkdtempSync(path.join(os.tmpdir(), "report-check-"));
      const context = await chromium.launchPersistentContext(profile, { executablePath: binary, headless: true, args: FLAGS, colorScheme: scheme, viewport: { width, height: 900 }, bypassCSP: false });
      const page = context.pages()[0] || await context.newPage();
      const errors = [], requests = [];
      let dialogs = 0;
      page.on("console", (m) => { if (["error", "warning"].includes(m.type())) errors.push(m.text()); });
      page.on("pageerror", (e) => errors.push(String(e)));
      page.on("dialog", (d) => { dialogs++; d.dismiss(); });
      page.on("request", (r) => { if (!r.url().startsWith("file:") && !r.url().startsWith("blob:") && !r.url().startsWith("data:")) requests.push(r.url()); });
      const began = performance.now();
      await page.goto("file://" + path.resolve(file), { waitUntil: "load" });
      const openMs = performance.now() - began;
      const scrollBegan = performance.now();
      // Every figure is drawn when it comes near.
      const figures = await page.evaluate(async () => {
        const found = [];
        const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        for (const one of document.querySelectorAll("figure.chart")) {
          one.scrollIntoView();
          // A figure draws itself when it comes near; the limit is for one that never does.
          for (let tries = 0; tries < 120 && !one.querySelector("canvas"); tries++) await frame();
          await frame();
          const canvas = one.querySelector("canvas");
          let inked = 0;
          if (canvas) {
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            for (let i = 3; i < pixels.length; i += 4) if (pixels[i]) inked++;
          }
          found.push({ key: one.id, inked });
        }
        return found;
      });
      const scrollMs = performance.now() - scrollBegan;
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      // Keyboard alone: the first chart's buttons and boxes can be reached and used.
      const keyboard = await page.evaluate(() => {
        const zoom = document.querySelector("figure.chart button[data-act=in]");
        if (!zoom) return "no chart";
        zoom.focus();
        return document.activeElement === zoom ? "focused" : "not focused";
      });
      if (keyboard === "focused") {
        await page.keyboard.press("Enter");
        await page.keyboard.press("Tab");
      }
      await page.evaluate(() => { document.querySelectorAll("details").forEach((d) => { d.open = true; }); });
      await page.waitForTimeout(200);
      const tables = await page.evaluate(() => document.querySelectorAll("details.points table tbody tr").length);
      const facts = await page.evaluate(() => Object.fromEntries([...document.querySelectorAll(".facts div")].map((d) => [d.querySelector("dt").textContent, d.querySelector("dd").textContent])));
      const data = await page.evaluate(() => JSON.parse(document.getElementById("data").textContent).figures.map((f) => ({ key: f.key, last: f.lines.map((l) => l.y[l.y.length - 1]) })));
      let violations = [];
      if (!process.env.REPORT_CHECK_NO_AXE) {
        // The page's own policy forbids foreign scripts, so axe runs in the debugger's isolated context.
        const session = await context.newCDPSession(page);
        const { frameTree } = await session.send("Page.getFrameTree");
        const { executionContextId } = await session.send("Page.createIsolatedWorld", { frameId: frameTree.frame.id });
        await session.send("Runtime.evaluate", { expression: axe, contextId: executionContextId });
        const ran = await session.send("Runtime.evaluate", { expression: "axe.run(document).then(r => r.violations.map(v => ({ id: v.id, impact: v.impact, nodes: v.nodes.length, example: v.nodes[0].html.slice(0, 200), why: v.nodes[0].failureSummary })))", awaitPromise: true, returnByValue: true, contextId: executionContextId });
        if (ran.exceptionDetails) throw new Error(JSON.stringify(ran.exceptionDetails));
        violations = ran.result.value;
      }
      if (shots) {
        await page.evaluate(() => { document.querySelectorAll("details").forEach((d) => { d.open = false; }); scrollTo(0, 0); });
        await page.waitForTimeout(150);
        await page.screenshot({ path: path.join(shots, `${path.basename(path.dirname(path.resolve(file)))}-${path.basename(file, ".html")}-${scheme}-${width}.png`), fullPage: true });
      }
      await context.close();
      fs.rmSync(profile, { recursive: true, force: true });
      const undrawn = figures.filter((f) => f.inked < 200).map((f) => f.key);
      const problems = [...errors, ...requests.map((r) => "request " + r), ...undrawn.map((k) => "not drawn: " + k), ...violations.map((v) => `axe ${v.impact} ${v.id}`)];
      if (wide > 0) problems.push(`${wide} px wider than the window`);
      if (dialogs) problems.push(`${dialogs} dialogs`);
      if (figures.length && keyboard !== "focused") problems.push("keyboard: " + keyboard);
      if (figures.length && !tables) problems.push("no table of the drawn points");
      failed ||= problems.length > 0;
      results.push({ report: path.join(path.basename(path.dirname(path.resolve(file))), path.basename(file)), bytes: fs.statSync(file).size, scheme, width, openMs: Math.round(openMs), scrollMs: Math.round(scrollMs), figures: figures.length, problems, violations, facts, data });
      console.log(`${file} ${scheme} ${width}: ${problems.length ? "FAILED " + JSON.stringify(problems) : "ok"}, ${figures.length} figures, opened in ${Math.round(openMs)} ms`);
    }
  }
}
if (out) fs.writeFileSync(out, JSON.stringify(results, null, 1) + "\n");
process.exit(failed ? 1 : 0);
