// Tabs of the validation sets, and the values under the pointer (or the arrow keys) on a chart. Without this script
// every set is shown below the other and the numbers are in the tables.
"use strict";
const tabs = [...document.querySelectorAll("[role=tab]")];
function select(tab, focus) {
  for (const other of tabs) {
    const on = other === tab;
    other.setAttribute("aria-selected", on);
    other.tabIndex = on ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = !on;
  }
  if (focus) tab.focus();
}
tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => { select(tab); history.replaceState(null, "", "#show-" + tab.getAttribute("aria-controls")); });
  tab.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move) { select(tabs[(i + move + tabs.length) % tabs.length], true); event.preventDefault(); }
  });
});
if (tabs.length) select(tabs.find((tab) => "#show-" + tab.getAttribute("aria-controls") === location.hash) || tabs[0]);

for (const figure of document.querySelectorAll(".chart")) {
  const svg = figure.querySelector("svg"), tip = figure.querySelector(".tip"), cursor = svg.querySelector(".cursor");
  const entries = JSON.parse(svg.dataset.readout);
  let at = -1;
  function show(i) {
    at = Math.max(0, Math.min(entries.length - 1, i));
    const [x, ...lines] = entries[at];
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.setAttribute("visibility", "visible");
    tip.textContent = lines.join("\n"); tip.hidden = false;
    const scale = svg.clientWidth / svg.viewBox.baseVal.width, left = x * scale;
    tip.style.left = left + 12 + tip.offsetWidth > figure.clientWidth ? Math.max(0, left - 12 - tip.offsetWidth) + "px" : left + 12 + "px";
  }
  function hide() { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let best = 0;
    entries.forEach((entry, i) => { if (Math.abs(entry[0] - x) < Math.abs(entries[best][0] - x)) best = i; });
    show(best);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -entries.length, End: entries.length }[event.key];
    if (move) { show(at < 0 ? 0 : at + move); event.preventDefault(); }
    if (event.key === "Escape") hide();
  });
}

const live = document.documentElement.dataset.live;
if (live) {
  setInterval(async () => {
    try {
      const reply = await fetch("version", { cache: "no-store" });
      if (reply.ok && (await reply.text()) !== live) location.reload();
    } catch { /* the live view has ended; the page stays as it is */ }
  }, 3000);
}
