// Asks the server, shows the answer token by token, then its sources. Every text is put in as text, never as HTML:
// documents and answers are untrusted. A group is one or several tokens that make whole characters together.
"use strict";
const $ = (id) => document.getElementById(id);
const COLORS = 8, LEVELS = 4;
let model = null, running = null, groups = [], found = null, picked = -1, shaded = null;

function make(tag, name, ...children) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  node.append(...children);
  return node;
}
function number(x, digits = 2) {
  const size = Math.abs(x), text = size >= 10 ** digits ? Math.round(size).toString()
    : size && size < 1e-4 ? size.toExponential(digits - 1) : size ? size.toPrecision(digits) : "0";
  return (x < 0 ? "\u2212" : "+") + text;
}
const clean = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
// A token in a title or a chip: without the space before it, and with signs where it is nothing but space.
const visible = (text) => clean(text).trim().replace(/\n/g, "\u21b5") || text.replace(/\n/g, "\u21b5").replace(/\s/g, "\u2423");

function problem(text) { $("problem").textContent = clean(text); $("problem").hidden = !text; }

async function call(path, body, signal) {
  const key = $("key").value, headers = { "Content-Type": "application/json" };
  if (key) { headers.Authorization = "Bearer " + key; sessionStorage.setItem("key", key); }
  let reply;
  try {
    reply = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers, signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached; it may have been stopped.");
  }
  if (reply.ok) return reply;
  if (reply.status === 401) $("key-label").hidden = false;
  const said = await reply.json().catch(() => null);
  throw new Error(said && said.error ? said.error.message : "The server answered with status " + reply.status + ".");
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

function bytesOf(choice) {
  const logprobs = choice.logprobs;
  if (!logprobs) return [];
  return model.chat ? logprobs.content.map((token) => [token.bytes, token.logprob])
    : logprobs.tokens.map((_, i) => [logprobs.bytes[i], logprobs.token_logprobs[i]]);
}

async function start() {
  try {
    model = (await (await call("v1/models")).json()).data[0];
  } catch (error) { problem(error.message); return; }
  problem("");
  $("model").textContent = model.id;
  document.title = model.id + " \u00b7 maxghost";
  const words = { "prompt-label": "Beginning of a text", title: "A continuation, and what taught it",
    send: "Continue", "answer-title": "Continuation" };
  if (!model.chat) for (const [id, text] of Object.entries(words)) $(id).textContent = text;
  $("max_tokens").max = model.max_model_len - 1;
  about();
}

function about(text = "") {
  const node = $("about");
  if (text || !model || model.sources) { node.textContent = text || "They appear here when the answer is complete."; return; }
  const [, said, command] = model.no_sources.match(/^(.*?)(maxghost .*)?$/s);
  node.replaceChildren("No sources: " + clean(said), ...(command ? [make("code", "", clean(command)), "Then start the server again."] : []));
}

async function ask(event) {
  event.preventDefault();
  const prompt = $("prompt").value;
  if (!prompt.trim() || running) return;
  if (!model) await start();
  if (!model) return;
  running = new AbortController();
  const own = running, asked = model.chat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  reset();
  const body = { ...asked, model: model.id, stream: true, return_token_ids: true, logprobs: model.chat ? true : 0, stream_options: { include_usage: true } };
  for (const name of ["max_tokens", "temperature", "top_p", "seed"]) if ($(name).value !== "") body[name] = Number($(name).value);
  const ids = [], begin = performance.now(), decoder = new TextDecoder();
  let pending = [], first = 0, finish = "", stopped = false;
  try {
    for await (const chunk of events(await call(model.chat ? "v1/chat/completions" : "v1/completions", body, own.signal))) {
      for (const choice of chunk.choices) {
        bytesOf(choice).forEach(([bytes, logp], i) => {
          first ||= performance.now();
          pending.push({ index: ids.length + i, logp });
          const text = decoder.decode(new Uint8Array(bytes), { stream: true });
          if (text) { add(text, pending); pending = []; }
        });
        ids.push(...(choice.token_ids || []));
        finish = choice.finish_reason || finish;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") stopped = true; else problem(error.message);
  }
  const rest = decoder.decode();
  if (rest && pending.length) add(rest, pending);
  $("answer").classList.remove("writing");
  const seconds = (performance.now() - first) / 1000, end = { stop: "", length: ", cut at the limit" }[finish] ?? ", stopped";
  const rate = ids.length > 1 && seconds > 0 ? ", " + Math.round((ids.length - 1) / seconds) + " per second" : "";
  if (ids.length) $("status").textContent = ids.length + (ids.length === 1 ? " token" : " tokens") + rate + (stopped ? ", stopped" : end);
  try {
    if (ids.length && model.sources && own === running) await sources(asked, ids, own.signal);
  } catch (error) {
    if (error.name !== "AbortError") { problem(error.message); about("No sources for this answer."); }
  }
  if (own === running) { running = null; busy(false); }
}

function busy(on) {
  $("send").disabled = on;
  $("stop").hidden = !on;
}

function reset() {
  groups = []; found = null; picked = -1; shaded = null;
  problem(""); about();
  for (const id of ["answer", "documents", "method"]) $(id).replaceChildren();
  $("status").textContent = ""; $("legend").hidden = true; $("all").hidden = true;
  $("sources-title").textContent = "Sources";
  $("answer-title").hidden = false;
  $("answer").classList.add("writing");
  busy(true);
}

function add(text, tokens) {
  const [, space, rest] = clean(text).match(/^([ \t]*)(.*)$/s), node = make("span", "token");
  if (rest && groups.length) $("answer").append(space);  // shades begin with the word
  const parts = (rest || (groups.length ? space : "")).split("\n");
  parts.forEach((part, i) => { if (i) node.append(make("span", "mark", "\u21b5"), "\n"); node.append(part); });
  const logp = tokens.reduce((sum, token) => sum + token.logp, 0);
  node.title = "probability " + Math.exp(logp).toPrecision(2);
  groups.push({ node, text, tokens: tokens.map((token) => token.index) });
  $("answer").append(node);
}

async function sources(asked, ids, signal) {
  about("Looking for the documents behind this answer\u2026");
  const top = Number($("top").value) || 10;
  found = await (await call("v1/sources", { ...asked, model: model.id, answer: ids, top }, signal)).json();
  groups.forEach((group, i) => {
    const node = group.node;
    node.setAttribute("role", "button");
    node.setAttribute("aria-pressed", "false");
    node.tabIndex = i ? -1 : 0;
    node.addEventListener("click", () => pick(picked === i ? -1 : i));
    node.addEventListener("keydown", (event) => {
      const move = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: groups.length - 1 }[event.key];
      if (move !== undefined && groups[move]) { focusToken(move); event.preventDefault(); }
      if (event.key === "Enter" || event.key === " ") { node.click(); event.preventDefault(); }
    });
  });
  pick(-1);
}

function focusToken(i) {
  groups.forEach((group, j) => { group.node.tabIndex = i === j ? 0 : -1; });
  groups[i].node.focus();
}

const nats = (document, group) => group.tokens.reduce((sum, token) => sum + (document.token_nats[token] || 0), 0);

// The words of the answer that a document helped most: {text: nats}, each text once, with its best place.
function helpedWords(document) {
  const words = [];
  let between = true;
  for (const group of groups) {
    if (between || /^\s/.test(group.text)) words.push({ text: "", value: 0 });
    const word = words.at(-1);
    word.text += group.text;
    word.value += nats(document, group);
    between = /\s$/.test(group.text);
  }
  const best = new Map();
  for (const { text, value } of words.sort((a, b) => b.value - a.value)) {
    if (value > 0 && text.trim() && !best.has(visible(text))) best.set(visible(text), value);
  }
  return [...best].slice(0, 4);
}

// The documents of the whole answer (i = -1), or of one group of tokens.
function pick(i) {
  picked = i;
  groups.forEach((group, j) => group.node.setAttribute("aria-pressed", String(i === j)));
  const group = groups[i], top = Math.max(1, Number($("top").value) || 10);
  let rows;
  if (group) {
    const places = new Set(group.tokens.flatMap((token) => found.token_top[token] || []));
    rows = [...places].map((place) => found.documents[place]).map((document) => ({ document, value: nats(document, group), error: null }));
    if (group.tokens.length > 1) rows.sort((a, b) => b.value - a.value);
  } else {
    rows = found.documents.map((document) => ({ document, value: document.nats, error: document.standard_error }));
  }
  rows = rows.slice(0, top);  // in the server's order, which may count more than nats
  $("sources-title").replaceChildren(...(group ? ["Sources of ", make("q", "", visible(group.text))] : ["Sources of the whole " + (model.chat ? "answer" : "continuation")]));
  $("all").hidden = !group;
  const pressed = model.chat ? "of the answer" : "of the text";
  const said = found.documents.length ? "Documents behind it" : "The index has no documents";
  about(group ? "Documents behind this token alone." : `${said}, found in ${found.seconds.toFixed(2)} s. Press a token ${pressed} for its own.`);
  $("about").title = found.unit;
  $("method").textContent = clean([found.method.replace(/^./, (letter) => letter.toUpperCase()) + ".", ...(found.notes || [])].join(" "));
  const largest = Math.max(...rows.map((row) => Math.abs(row.value) + (row.error || 0)), 1e-30);
  const least = Math.min(0, ...rows.map((row) => row.value - (row.error || 0)));
  $("documents").replaceChildren(...rows.map((row, rank) => card(row, rank, least, largest)));
  shade(null, false);
}

const domains = new Map();
function card({ document: source, value, error }, rank, least, largest) {
  const item = make("li", "document"), button = make("button"), unsure = error !== null && Math.abs(value) < 2 * error;
  if (unsure) item.classList.add("unsure");
  button.type = "button";
  if (!domains.has(source.domain)) domains.set(source.domain, domains.size % COLORS);
  const where = make("span", "where"), domain = make("b", "", clean(source.domain));
  domain.style.color = `var(--c${domains.get(source.domain)})`;
  where.append(domain, " \u00b7 " + clean(source.path));
  where.title = clean(`${source.path}, byte ${source.offset} + ${source.chunk}`);
  const worth = make("span", "worth", make("b", "", number(value)), " nats");
  if (error !== null) worth.append(make("small", "", " \u00b1 " + number(error, 1).slice(1)));
  if (unsure) worth.title = "less than two standard errors from nothing";
  const helped = make("span", "helped"), best = helpedWords(source), strongest = best.length ? best[0][1] : 1;
  for (const [word, v] of best) {
    const mark = make("span", "up" + Math.max(1, Math.round(v / strongest * LEVELS)), word);
    helped.append(make("span", "", mark, " " + number(v)));
  }
  const excerpt = make("span", "excerpt", clean(source.text).replace(/\s+/g, " ").trim() || "(no visible characters)");
  button.append(make("span", "rank", String(rank + 1)), where, worth, excerpt, bar(value, error || 0, least, largest), helped);
  button.setAttribute("aria-expanded", "false");
  const detail = make("div", "detail");
  detail.hidden = true;
  button.addEventListener("click", () => {
    const open = detail.hidden;
    if (open && !detail.childElementCount) detail.append(...details(source));
    detail.hidden = !open;
    button.setAttribute("aria-expanded", String(open));
    shade(open ? { source, item } : null, true);
  });
  for (const name of ["pointerenter", "focus"]) button.addEventListener(name, () => shade({ source, item }, false));
  for (const name of ["pointerleave", "blur"]) button.addEventListener(name, () => shade(null, false));
  button.addEventListener("keydown", (event) => {
    const other = { ArrowDown: item.nextSibling, ArrowUp: item.previousSibling }[event.key];
    if (other) { other.firstChild.focus(); event.preventDefault(); }
  });
  item.append(button, detail);
  return item;
}

function bar(value, error, least, largest) {
  const wide = 132, high = 16, x = (v) => (v - least) / (largest - least || 1) * wide;
  const draw = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, text] of Object.entries(attributes)) node.setAttribute(name, text);
    return node;
  };
  const svg = draw("svg", { class: "bar", viewBox: `0 0 ${wide} ${high}`, "aria-hidden": "true", preserveAspectRatio: "none" });
  svg.append(draw("rect", { x: Math.min(x(0), x(value)), y: 3, width: Math.max(1, Math.abs(x(value) - x(0))), height: 10, rx: 1.5, class: value < 0 ? "hurts" : "helps" }));
  svg.append(draw("line", { x1: x(0), x2: x(0), y1: 0, y2: high }));
  if (error) svg.append(draw("path", { d: `M${x(value - error)} 8H${x(value + error)}M${x(value - error)} 5v6M${x(value + error)} 5v6` }));
  return svg;
}

function details(source) {
  const parts = [make("pre", "", clean(source.text))];
  parts[0].tabIndex = 0;
  if (!source.trained.length) return [...parts, make("p", "note", found.trained_for ? "The log of this run has no step that trained on it." : "When the run trained on it is not known.")];
  const row = (tag, ...texts) => make("tr", "", ...texts.map((text) => make(tag, "", String(text))));
  const body = source.trained.map((one) => row("td", one.step, one.epoch, number(one.contribution)));
  const caption = `Where the run trained on it, and what that did to the ${clean(found.trained_for || "validation")} loss then`;
  const head = make("thead", "", row("th", "Step", "Epoch", "Contribution, nats"));
  return [...parts, make("table", "", make("caption", "", caption), head, make("tbody", "", ...body))];
}

// Shades the tokens by what a document did for each; one that was opened stays, another is a preview.
function shade(chosen, keep) {
  if (keep) shaded = chosen;
  const shown = chosen || shaded;
  document.querySelector(".document.active")?.classList.remove("active");
  const values = groups.map((group) => shown ? nats(shown.source, group) : 0);
  const largest = Math.max(...values.map(Math.abs), 1e-30);
  groups.forEach((group, i) => {
    const level = Math.ceil(Math.abs(values[i]) / largest * LEVELS - 0.5);
    group.node.className = "token" + (level > 0 ? (values[i] > 0 ? " up" : " down") + level : "");
  });
  $("legend").hidden = !shown;
  if (shown) shown.item.classList.add("active");
}

$("form").addEventListener("submit", ask);
$("stop").addEventListener("click", () => running && running.abort());
$("all").addEventListener("click", () => { const i = picked; pick(-1); if (groups[i]) groups[i].node.focus(); });
$("key").addEventListener("change", start);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && found && picked >= 0) $("all").click();
});
$("key").value = sessionStorage.getItem("key") || "";
start();
