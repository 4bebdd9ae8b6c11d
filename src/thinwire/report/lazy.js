"use strict";
// Work on elements of a page: at once on what is near the window, on all else when the browser has
// nothing to do, so that a page of many methods is read and scrolled while its end is drawn.
var thinwire = globalThis.thinwire ?? {};
(() => {
  const page = thinwire;
  const works = new Map();
  const near = new Set();
  const stale = new Set();
  let waiting = false;

  const renew = (element) => {
    if (!stale.delete(element)) return;
    works.get(element)();
    element.removeAttribute("aria-busy");
  };
  // Safari has no such callback.
  const later = globalThis.requestIdleCallback ?? ((work) => setTimeout(work, 20));
  const one = () => {
    const [element] = stale;
    if (element) renew(element);
    waiting = stale.size > 0;
    if (waiting) later(one, { timeout: 500 });
  };
  const look = () => {
    near.forEach(renew);
    if (!waiting) later(one, { timeout: 500 });
    waiting = true;
  };
  const observer = new IntersectionObserver(
    (entries) => {
      entries.forEach(({ isIntersecting, target }) => near[isIntersecting ? "add" : "delete"](target));
      look();
      document.documentElement.dataset.drawn ??= Math.round(performance.now());
    },
    { rootMargin: "200px" },
  );

  // Elements whose work has to be done, again or for the first time.
  page.refresh = (elements = works.keys()) => {
    for (const element of elements) {
      stale.add(element);
      element.setAttribute("aria-busy", "true");
    }
    look();
  };
  page.lazily = (element, work) => {
    works.set(element, work);
    stale.add(element);
    element.setAttribute("aria-busy", "true");
    observer.observe(element);
  };
  addEventListener("beforeprint", () => stale.forEach(renew));
})();
