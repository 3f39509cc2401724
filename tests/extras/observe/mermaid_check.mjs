// Parses the given files with Mermaid's own parser: node mermaid_check.mjs DIR FILE...
// DIR holds node_modules with mermaid and jsdom (npm install mermaid jsdom).
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const directory = resolve(process.argv[2]);
const { JSDOM } = createRequire(join(directory, "x.js"))("jsdom");
const dom = new JSDOM("<!doctype html><body></body>");
globalThis.window = dom.window;
globalThis.document = dom.window.document;
const entry = join(directory, "node_modules/mermaid/dist/mermaid.core.mjs");
const mermaid = (await import(pathToFileURL(entry).href)).default;

let failed = 0;
for (const file of process.argv.slice(3)) {
  try {
    await mermaid.parse(readFileSync(file, "utf8"));
  } catch (error) {
    failed += 1;
    console.log(`${file}: ${error.message}`);
  }
}
process.exit(failed ? 1 : 0);
