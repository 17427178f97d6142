// What htmx cannot do: events of the server, keys, light and dark, copying, and keeping what somebody has open or typed.
"use strict";

(() => {
  const root = document.documentElement;

  // Light and dark: what somebody chose, else what the system says. Before anything is painted.
  const stored = (() => { try { return localStorage.getItem("theme"); } catch { return null; } })();
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;

  function toggleTheme() {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* it holds for this page */ }
  }

  // The token of the first visit does not stay in the address bar, nor in the history.
  const address = new URL(location.href);
  if (address.searchParams.has("token") || address.searchParams.has("said")) {
    address.searchParams.delete("token");
    address.searchParams.delete("said");
    history.replaceState(null, "", address);
  }

  // Banner.

  function say(text, tone) {
    const banner = document.getElementById("banner");
    banner.textContent = text;
    banner.className = `banner ${tone || ""}`;
    banner.hidden = !text;
  }

  // Live: one stream for the part of the page that has `data-live`, closed while nobody looks.

  let source = null;
  let waiting = 0;
  let restedAt = 0; // A page that takes long to load is loaded less often.

  function load() {
    const part = document.querySelector("[data-live]"), began = performance.now();
    if (!part) return;
    part.addEventListener("htmx:afterRequest", () => { restedAt = 2 * performance.now() - began; }, { once: true });
    htmx.trigger(part, "changed");
  }

  function follow() {
    const live = document.querySelector("[data-live]");
    if (!live || source || document.hidden) return;
    source = new EventSource(live.dataset.live);
    source.addEventListener("changed", (event) => {
      const part = document.querySelector("[data-live]");
      if (!part || part.dataset.stamp === event.data) return;
      part.dataset.stamp = event.data;
      clearTimeout(waiting);
      waiting = setTimeout(load, Math.max(0, restedAt - performance.now()));
    });
    source.addEventListener("away", (event) => say(`The store does not answer; trying again. ${event.data}`, "bad"));
    source.addEventListener("back", () => say("", ""));
    source.addEventListener("gone", (event) => { say(event.data, "bad"); leave(); });
    source.onerror = () => say("The viewer does not answer; trying again.", "bad");
    source.onopen = () => say("", "");
  }

  function leave() {
    if (source) source.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? leave() : follow()));
  addEventListener("pagehide", leave);
  addEventListener("pageshow", follow);

  // A part that is as it was stays; in one that changes, what is open stays open and what was typed stays typed.

  const kept = new Map();

  const keyOf = (element, at) => element.id || `${element.closest("[id]")?.id}#${at}`;

  function keep(part) {
    const open = [...part.querySelectorAll("details[data-keep]")].map((each, at) => [keyOf(each, at), each.open]);
    const typed = [...part.querySelectorAll("input[id], textarea[id]")]
      .filter((each) => each.type !== "hidden" && each.value !== each.defaultValue)
      .map((each) => [each.id, each.value]);
    kept.set(part.id, { open: new Map(open), typed });
  }

  function restore(part) {
    const was = kept.get(part.id);
    if (!was) return;
    kept.delete(part.id);
    [...part.querySelectorAll("details[data-keep]")].forEach((each, at) => {
      const open = was.open.get(keyOf(each, at));
      if (open !== undefined) each.open = open;
    });
    for (const [id, value] of was.typed) {
      const field = document.getElementById(id);
      if (field) field.value = value;
    }
  }

  function settle(part) {
    restore(part);
    tellAges(part);
  }

  document.addEventListener("htmx:oobBeforeSwap", (event) => {
    const old = event.detail.target, fresh = event.detail.fragment.querySelector(`[id="${old.id}"]`);
    if (fresh && fresh.dataset.digest === old.dataset.digest) event.detail.shouldSwap = false;
    else keep(old);
  });
  document.addEventListener("htmx:oobAfterSwap", (event) => {
    const part = document.getElementById(event.detail.target.id);
    if (part) settle(part);
  });
  document.addEventListener("htmx:beforeSwap", (event) => {
    const { xhr, target } = event.detail;
    if (xhr.status >= 400) { event.detail.shouldSwap = false; say("What changed could not be loaded; trying again.", "bad"); return; }
    if (target.dataset.live) keep(target);
  });
  document.addEventListener("htmx:afterSettle", (event) => {
    const part = document.getElementById(event.detail.target?.id);
    if (part) settle(part);
  });
  document.addEventListener("htmx:sendError", () => say("The viewer does not answer; trying again.", "bad"));

  // How long ago.

  function ago(when) {
    const seconds = Math.round((Date.now() - when) / 1000);
    const far = Math.abs(seconds);
    const told = far < 60 ? `${far} s` : far < 3600 ? `${Math.floor(far / 60)} min`
      : far < 86400 ? `${Math.floor(far / 3600)} h` : `${Math.floor(far / 86400)} d`;
    return seconds >= 0 ? `${told} ago` : `in ${told}`;
  }

  function tellAges(within) {
    for (const time of within.querySelectorAll("time[datetime]:not(.clock)")) {
      if (!time.title) time.title = time.textContent;
      time.textContent = ago(Date.parse(time.dateTime));
    }
  }

  setInterval(() => { if (!document.hidden) tellAges(document); }, 10_000);

  // Keys.

  function move(step) {
    const rows = [...document.querySelectorAll("[data-row]")];
    if (!rows.length) return;
    const at = rows.indexOf(document.activeElement);
    const next = at < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + step));
    rows[next].focus();
    rows[next].scrollIntoView({ block: "nearest" });
  }

  const isTyping = (element) => element.closest("input, textarea, select, [contenteditable], dialog");

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    const does = {
      j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
      "/": () => document.getElementById("q")?.focus(),
      "?": () => document.getElementById("help").showModal(),
      g: () => { location.href = "/"; }, i: () => { location.href = "/inbox"; },
    }[event.key];
    const scrolls = event.key.startsWith("Arrow") && !document.querySelector("[data-row]");
    if (!does || scrolls) return;
    event.preventDefault();
    does();
  });

  document.addEventListener("click", async (event) => {
    const copy = event.target.closest("[data-copy]");
    if (copy) {
      await navigator.clipboard.writeText(copy.dataset.copy);
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    }
    if (event.target.closest("#theme")) toggleTheme();
    if (event.target.closest("#help-button")) document.getElementById("help").showModal();
  });

  document.addEventListener("DOMContentLoaded", () => {
    tellAges(document);
    follow();
    document.querySelector("[aria-invalid], .why-not")?.scrollIntoView({ block: "center" });
  });
})();
