// Refreshes pages without a reload. Every page also works without it; nothing here changes state
// on the server.
"use strict";

(() => {
  const EVERY_MS = 2000;
  const LONGEST_MS = 30000;
  const PATIENCE_MS = 15000;
  const live = document.getElementById("live");
  const status = document.getElementById("status");
  const all = (what, root = document) => [...root.querySelectorAll(what)];

  // --- times ------------------------------------------------------------------------------

  const sameDay = (one, other) => one.toDateString() === other.toDateString();
  const two = (n) => String(n).padStart(2, "0");
  const clock = (at) => `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;

  // In ISO order, so that day and month cannot be confused.
  const date = (at) => `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;

  function local(time, at, now) {
    if ("ago" in time.dataset) return ago(now - at);
    const ms = "exact" in time.dataset ? `.${String(at.getMilliseconds()).padStart(3, "0")}` : "";
    return `${sameDay(at, now) ? "" : `${date(at)} `}${clock(at)}${ms}`;
  }

  function ago(ms) {
    const s = Math.round(Math.abs(ms) / 1000);
    if (s < 2) return "now";
    const text =
      s < 120 ? `${s} s` : s < 7200 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
    return ms < 0 ? `in ${text}` : `${text} ago`;
  }

  // The server's time less the browser's, so that "3 s ago" is true where a clock is wrong.
  let offset = 0;

  function showTimes(root = document) {
    const now = new Date(Date.now() + offset);
    for (const time of all("time[datetime]", root)) {
      const at = new Date(time.dateTime);
      if (isNaN(at)) continue;
      if (!time.title) time.title = time.dateTime;
      const text = local(time, at, now);
      if (time.textContent !== text) time.textContent = text;
    }
  }

  // --- small features ---------------------------------------------------------------------

  function enhance(root = document) {
    for (const part of all("[data-js], .copy", root)) part.hidden = false;
    showTimes(root);
  }

  async function copy(button) {
    const before = [...button.childNodes];
    let result = "Copied";
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
    } catch {
      result = "Not allowed";
    }
    button.textContent = result;
    setTimeout(() => button.replaceChildren(...before), 1500);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.(".copy");
    if (button) copy(button);
  });

  document.addEventListener("change", (event) => {
    const box = event.target;
    const form = box.form ?? box.closest?.("form");
    if (box.type !== "checkbox" || !form) return;
    const others = (name) => [...form.elements].filter((e) => e.type === "checkbox" && e.name === name && !e.disabled);
    if (box.dataset.all) {
      for (const other of others(box.dataset.all)) other.checked = box.checked;
      return;
    }
    for (const master of all("[data-all]", form)) {
      const checked = others(master.dataset.all).map((e) => e.checked);
      master.checked = checked.length > 0 && checked.every(Boolean);
      master.indeterminate = !master.checked && checked.some(Boolean);
    }
  });

  // --- live -------------------------------------------------------------------------------

  let wait = EVERY_MS;
  let timer = 0;
  let lostAt = null;
  let isAsking = false;
  let isOver = false;

  // True if the user is working in this part: replacing it would lose focus, selection or input.
  function isHeld(part) {
    const focus = document.activeElement;
    if (focus && focus !== document.body && part.contains(focus) && focus.matches(":focus-visible")) return true;
    const chosen = document.getSelection();
    if (chosen && !chosen.isCollapsed && chosen.rangeCount && chosen.getRangeAt(0).intersectsNode(part)) return true;
    return all("details[open]:not([id]), input:checked", part).length > 0;
  }

  // The last HTML received for each part: most parts rarely change.
  const came = new Map();

  function replace(part, fresh) {
    const html = fresh.outerHTML;
    if (came.get(part.id) === html || isHeld(part)) return;
    came.set(part.id, html);
    for (const open of all("details[id]", part)) {
      const same = fresh.querySelector(`#${CSS.escape(open.id)}`);
      if (same) same.open = open.open;
    }
    const moved = all(".scroll[id]", part).map((region) => [region.id, region.scrollLeft, region.scrollTop]);
    enhance(fresh);
    part.replaceWith(fresh);
    for (const [id, left, top] of moved) document.getElementById(id)?.scrollTo(left, top);
  }

  function showState(kind, text) {
    live.className = `live ${kind}`;
    if (live.textContent !== text) live.textContent = text;
  }

  function showError(text) {
    if (status.textContent !== text) status.textContent = text;
  }

  // Announces a change of state to screen readers, but not every changed number.
  let said = document.querySelector("[data-say]")?.dataset.say;

  function announce() {
    const now = document.querySelector("[data-say]")?.dataset.say;
    if (now !== said) document.getElementById("said").textContent = now ?? "";
    said = now;
  }

  async function refresh() {
    const answer = await fetch(location.href, {
      headers: { "X-Live": "1" },
      cache: "no-store",
      redirect: "manual",
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
    if (answer.type === "opaqueredirect" || answer.status === 401 || answer.status === 403) {
      showError("You are no longer logged in. Reload the page to log in again.");
      showState("lost", "Stopped");
      return false;
    }
    if (!answer.ok) throw new Error(String(answer.status));
    const served = Date.parse(answer.headers.get("Date"));
    // "Date" has whole seconds: a smaller difference is not significant.
    if (served && Math.abs(served - Date.now()) > 1500) offset = served - Date.now();
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of all("[data-live]")) {
      const fresh = page.getElementById(part.id);
      if (fresh) replace(part, document.adoptNode(fresh));
    }
    document.title = page.title;
    announce();
    return true;
  }

  async function ask() {
    clearTimeout(timer);
    if (document.hidden || isAsking || isOver) return;
    isAsking = true;
    try {
      isOver = !(await refresh());
      wait = EVERY_MS;
      lostAt = null;
      if (!isOver) {
        showError("");
        showState("on", "Live");
      }
    } catch {
      lostAt ??= new Date();
      wait = Math.min(wait * 2, LONGEST_MS);
      showError(`oncebridge is unreachable since ${clock(lostAt)}. The page shows the state from then.`);
      showState("lost", "Unreachable");
    } finally {
      isAsking = false;
    }
    if (!isOver) timer = setTimeout(ask, wait);
  }

  for (const zone of all("[data-zone]")) zone.textContent = "in your time zone; point at one to see UTC";
  enhance();
  setInterval(() => document.hidden || showTimes(), 1000);
  if (all("[data-live]").length) {
    document.addEventListener("visibilitychange", ask);
    showState("on", "Live");
    timer = setTimeout(ask, EVERY_MS);
  }
})();
