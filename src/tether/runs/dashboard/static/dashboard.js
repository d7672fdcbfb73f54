// The dashboard's own script: draws charts, keeps the page up to date while runs train, applies filters as they are changed.
// Text reaches the page escaped by the server, or through textContent; nothing here makes markup from data.
"use strict";

const CONFIG = { displayModeBar: false, responsive: true };

async function draw(element) {
  const address = element.dataset.figure;
  const answer = await fetch(address);
  const data = await answer.json();
  if (element.dataset.figure !== address) return; // the filter was changed meanwhile
  const reading = element.parentElement.querySelector(".reading");
  reading.textContent = data.error || data.reading;
  element.parentElement.classList.toggle("empty", !data.figure);
  if (!data.figure) return;
  await Plotly.react(element, data.figure.data, data.figure.layout, CONFIG);
  if (!element.dataset.clickable && element.dataset.run) {
    element.dataset.clickable = "yes";
    element.on("plotly_click", (event) => {
      const step = event.points[0].x;
      if (Number.isInteger(step)) location.href = "/trajectories?" + new URLSearchParams({ run: element.dataset.run, step: step });
    });
  }
  element.dataset.drawn = String(Number(element.dataset.drawn || 0) + 1);
}

// A few at a time and those in view first: the server answers a chart in milliseconds, the browser takes longer to draw it.
const inView = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting && entry.target.dataset.stale) {
      delete entry.target.dataset.stale;
      draw(entry.target);
    }
  }
}, { rootMargin: "400px" });

// Those out of view follow when the browser has nothing else to do, one at a time: a page that is printed has all its figures.
async function drawRest() {
  const next = [...document.querySelectorAll("[data-figure][data-stale]")].find((each) => each.closest("details:not([open])") === null);
  if (!next) { resting = true; return; }
  delete next.dataset.stale;
  await draw(next);
  whenIdle(drawRest);
}
const whenIdle = window.requestIdleCallback || ((act) => setTimeout(act, 50));
let resting = true;

// A sheet is narrower than most windows, and printing raises no resize event.
const drawn = () => document.querySelectorAll(".js-plotly-plot");
addEventListener("beforeprint", () => drawn().forEach((chart) => Plotly.relayout(chart, { width: Math.min(chart.clientWidth, 640) })));
addEventListener("afterprint", () => drawn().forEach((chart) => Plotly.relayout(chart, { width: null, autosize: true })));

function refreshCharts(root) {
  if (resting) { resting = false; setTimeout(() => whenIdle(drawRest), 300); }
  for (const element of root.querySelectorAll("[data-figure]")) {
    element.dataset.stale = "yes";
    inView.unobserve(element);
    inView.observe(element);
  }
}

async function load(element) {
  const answer = await fetch(element.dataset.load);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  element.replaceChildren(...page.body.childNodes);
}

let latest = 0;
async function swap(address) {
  const turn = ++latest;
  const answer = await fetch(address, { headers: { accept: "text/html" } });
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (turn !== latest) return;
  const failure = page.getElementById("error");
  for (const old of document.querySelectorAll("[data-swap]")) {
    const fresh = failure ? failure : page.getElementById(old.id);
    if (!fresh) continue;
    const ticked = new Set([...old.querySelectorAll("input:checked")].map((box) => box.name + " " + box.value));
    const open = [...old.querySelectorAll("details")].map((each) => each.open);
    const charts = old.querySelectorAll("[data-figure]");
    old.replaceChildren(...(failure ? [fresh] : fresh.childNodes));
    for (const box of old.querySelectorAll("input[type=checkbox], input[type=radio]")) box.checked = ticked.has(box.name + " " + box.value);
    old.querySelectorAll("details").forEach((each, place) => { each.open = Boolean(open[place]); });
    // A chart that is already drawn stays where it is: only its data is asked for again.
    old.querySelectorAll("[data-figure]").forEach((place, number) => {
      const kept = charts[number];
      if (!kept) return;
      kept.dataset.figure = place.dataset.figure;
      kept.dataset.run = place.dataset.run;
      const reading = kept.parentElement;
      place.parentElement.classList.toggle("empty", reading ? reading.classList.contains("empty") : false);
      place.replaceWith(kept);
    });
    refreshCharts(old);
  }
}

function filterAddress(form) {
  const words = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (value) words.append(name, value);
  return form.getAttribute("action") + "?" + words;
}

for (const form of document.querySelectorAll("form[data-filter]")) {
  let waiting = 0;
  const apply = () => {
    const address = filterAddress(form);
    if ("reload" in form.dataset) { location.href = address; return; }
    history.replaceState(null, "", address);
    swap(address);
  };
  form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(apply, 150); });
  form.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(waiting); apply(); });
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-link]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  history.replaceState(null, "", link.getAttribute("href"));
  const words = new URL(link.href).searchParams;
  for (const name of ["sort", "order"]) {
    const field = document.querySelector(`form[data-filter] input[type=hidden][name=${name}]`);
    if (field) field.value = words.get(name) || "";
  }
  swap(link.getAttribute("href"));
});

if (document.body.dataset.events) {
  const shown = document.getElementById("live");
  const source = new EventSource(document.body.dataset.events);
  let asked = 0;
  source.addEventListener("ready", () => { shown.textContent = "live"; shown.classList.add("on"); });
  source.addEventListener("change", () => {
    clearTimeout(asked);
    asked = setTimeout(() => {
      swap(location.pathname + location.search);
      refreshCharts(document);
      document.body.dataset.updates = String(Number(document.body.dataset.updates || 0) + 1);
    }, 100);
  });
  source.addEventListener("error", () => { shown.textContent = "no connection"; shown.classList.remove("on"); });
  addEventListener("beforeunload", () => source.close());
}

const root = document.documentElement, theme = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
const nameTheme = () => { theme.textContent = isDark() ? "light" : "dark"; theme.title = `Show the pages ${theme.textContent}`; };
root.dataset.theme = localStorage.getItem("tether-theme") || "";
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  localStorage.setItem("tether-theme", root.dataset.theme);
  nameTheme();
});
system.addEventListener("change", nameTheme);
theme.hidden = false;
nameTheme();

refreshCharts(document);
document.querySelectorAll("[data-load]").forEach(load);
