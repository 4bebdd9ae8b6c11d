"use strict";
// A page that is written anew while its runs go on loads itself again, and its reader finds what
// was chosen, opened, sorted and in view as it was. `data-keep` names what is kept: it is the same
// in the next page, also if that has more methods.
(() => {
  const place = `thinwire ${location.pathname}`;
  const kept = () => [...document.querySelectorAll("[data-keep]")];
  const text = (element) => element.textContent.trim();
  const state = (button) => (button.hasAttribute("aria-expanded") ? "aria-expanded" : "aria-pressed");

  // What an element looks like where its reader changed it, else undefined: what was left alone
  // follows the new page.
  const look = (element) => {
    if (element.matches("details")) return element.open;
    if (element.matches("table")) {
      const head = element.querySelector("th[aria-sort]");
      return head ? [text(head), head.getAttribute("aria-sort")] : undefined;
    }
    if (element.matches("button")) return element.getAttribute(state(element)) ?? undefined;
    if (element.matches("select")) return text(element.selectedOptions[0] ?? element);
    if (element.matches("[type=checkbox], [type=radio]")) {
      return element.checked === element.defaultChecked ? undefined : element.checked;
    }
    if (element.matches("input")) {
      return element.value === element.defaultValue ? undefined : element.value;
    }
    return element.dataset.view;
  };
  const changed = (element) => element.dispatchEvent(new Event("change", { bubbles: true }));
  const sorted = (table, [name, direction]) => {
    const head = [...table.querySelectorAll("thead th")].find((each) => text(each) === name);
    for (let times = 0; times < 2 && head?.getAttribute("aria-sort") !== direction; times += 1) {
      head?.querySelector("button").click();
    }
  };
  const restore = (element, was) => {
    if (element.matches("details")) element.open = was;
    else if (element.matches("table")) sorted(element, was);
    else if (element.matches("button")) {
      if (element.getAttribute(state(element)) !== was) element.click();
    } else if (element.matches("select")) {
      const option = [...element.options].find((each) => text(each) === was);
      if (option && !option.selected) {
        option.selected = true;
        changed(element);
      }
    } else if (element.matches("[type=checkbox], [type=radio]")) {
      element.checked = was;
      changed(element);
    } else if (element.matches("input")) {
      element.value = was;
      element.dispatchEvent(new Event("input", { bubbles: true }));
    } else {
      element.dataset.view = was;
      element.dispatchEvent(new Event("view"));
    }
  };

  // The heading at the top of the window, not the distance from the page's: tables grow.
  const inView = () => {
    const above = [...document.querySelectorAll("h1, h2, h3")].filter(
      (each) => each.getClientRects().length && each.getBoundingClientRect().top <= 1,
    );
    const heading = above.at(-1) ?? document.querySelector("h1");
    const sides = [...document.querySelectorAll(".scroll")].map((each) => [
      each.scrollLeft,
      each.scrollTop,
    ]);
    return { text: text(heading), above: heading.getBoundingClientRect().top, sides };
  };
  const scrollBack = (view) => {
    const found = [...document.querySelectorAll("h1, h2, h3")].find(
      (each) => text(each) === view.text && each.getClientRects().length,
    );
    if (found) scrollBy({ top: found.getBoundingClientRect().top - view.above, behavior: "instant" });
    document.querySelectorAll(".scroll").forEach((each, index) => {
      [each.scrollLeft, each.scrollTop] = view.sides[index] ?? [0, 0];
    });
  };

  // A browser may refuse its storage to a page that was opened from a file: then nothing is kept.
  const save = () => {
    const looks = kept().map((element) => [element.dataset.keep, look(element)]);
    const found = {
      looks: looks.filter(([, its]) => its !== undefined),
      view: inView(),
      focus: document.activeElement?.dataset.keep,
    };
    try {
      sessionStorage.setItem(place, JSON.stringify(found));
    } catch {
      return;
    }
  };
  const saved = () => {
    try {
      const found = JSON.parse(sessionStorage.getItem(place));
      sessionStorage.removeItem(place);
      return found;
    } catch {
      return null;
    }
  };

  const before = saved();
  if (before) {
    history.scrollRestoration = "manual";
    const elements = new Map(kept().map((element) => [element.dataset.keep, element]));
    for (const [name, was] of before.looks) {
      if (elements.has(name)) restore(elements.get(name), was);
    }
    scrollBack(before.view);
    elements.get(before.focus)?.focus({ preventScroll: true });
  }

  // -- loading again -------------------------------------------------------------------------------

  const live = document.getElementById("live");
  if (!live) return;
  const pause = live.querySelector("button");
  const every = 1000 * Number(live.dataset.every);
  let touched = 0;
  for (const kind of ["input", "keydown", "pointerdown", "wheel", "touchmove"]) {
    addEventListener(kind, () => (touched = Date.now()), { passive: true });
  }
  pause.addEventListener("click", () => {
    const paused = pause.getAttribute("aria-pressed") !== "true";
    pause.setAttribute("aria-pressed", String(paused));
  });
  // Not under the hands of its reader, and not where it is not seen.
  const again = () => {
    const busy = document.hidden || Date.now() - touched < Math.min(every, 2000);
    if (busy || pause.getAttribute("aria-pressed") === "true") {
      setTimeout(again, Math.min(every, 1000));
      return;
    }
    save();
    location.reload();
  };
  setTimeout(again, every);
})();
