"use strict";
// What a report does when its reader chooses something.
(() => {
  const page = (globalThis.thinwire ??= {}); // empty where no run is finished
  const find = (name) => document.getElementById(name);
  const { variants } = JSON.parse(find("report-data")?.textContent ?? "{}");
  const controls = [...document.querySelectorAll("[data-keep]")];
  const boxes = controls.filter((control) => control.dataset.variant);
  const isShown = (variant) => variant === undefined || boxes.find((box) => box.dataset.variant === String(variant)).checked;
  let link = null;
  const played = new Map();
  const runOf = (variant) => {
    const { replay } = variants[variant];
    if (replay && link && !played.has(variant)) played.set(variant, page.simulate(replay, link));
    return played.get(variant);
  };
  const bar = (kind, from, to) => `<i class="${kind}" style="left:${100 * from}%;width:${100 * (to - from)}%"></i>`;
  const play = () => {
    if (!find("link")) return;
    const number = (name) => Number(find(name).value || NaN);
    const [rate, latency, step] = [number("bandwidth") * 1e6, number("latency") / 1e3, number("step") / 1e3];
    const isSound = rate > 0 && latency >= 0 && step > 0;
    find("link-told").hidden = isSound;
    if (!isSound) return;
    link = { rate, latency, step, topology: find("topology").value };
    played.clear();
    document.querySelectorAll("#on-link tbody tr").forEach((row) => {
      const [name, ...cells] = row.children;
      const run = runOf(Number(name.dataset.value));
      const { computing, waiting, hidden } = page.shares(run);
      const [idle, busy] = [(computing - hidden) / run.wall, computing / run.wall];
      const lane = bar("computing", 0, idle) + bar("hidden", idle, busy) + bar("waiting", busy, 1);
      const texts = [page.duration(run.wall), page.percent(busy), page.duration(waiting), page.duration(hidden), ""];
      [run.wall, busy, waiting, hidden, busy].forEach((value, i) => {
        cells[i].dataset.value = value;
        cells[i].innerHTML = texts[i] || `<div class="lane" aria-hidden="true">${lane}</div>`;
      });
    });
    drawTimeline();
  };
  // At least twelve steps from the middle of the run.
  const drawTimeline = () => {
    const variant = Number(find("timeline-variant").value);
    const [{ label, replay: { every, steps } }, run] = [variants[variant], runOf(variant)];
    const middle = Math.max(0, Math.floor(steps / 2 / every) * every - every);
    const last = Math.min(steps, middle + Math.max(3 * every, 12));
    const [from, to] = [run.at[middle], run.at[last]];
    const cut = (its) => [its.from, its.to].map((at) => Math.min(1, Math.max(0, (at - from) / (to - from))));
    const [waits, transfers] = [run.waits, run.transfers].map((all) => all.map(cut).filter(([a, b]) => b > a));
    const bars = (kind, intervals) => intervals.map((its) => bar(kind, ...its)).join("");
    find("lane-worker").innerHTML = bar("computing", 0, 1) + bars("waiting", waits);
    find("lane-link").innerHTML = bars("hidden", transfers);
    const waited = waits.reduce((sum, [a, b]) => sum + b - a, 0) * (to - from);
    find("timeline-told").textContent = `${label}, inner steps ${middle + 1} to ${last} of ${steps}: ` +
      `${page.duration(to - from)}, of which ${page.duration(waited)} waiting.`;
  };
  const curves = (section) => {
    const [x, y] = ["x", "y"].map((name) => section.querySelector(`select.${name}`));
    const axisOf = (select) => ({
      title: { text: select.selectedOptions[0].text },
      format: select.selectedOptions[0].dataset.format,
      type: section.querySelector(`.log-${select.className}`).checked ? "log" : "linear",
    });
    const [xaxis, yaxis] = [axisOf(x), axisOf(y)];
    const title = `${yaxis.title.text.split(",")[0]} against ${xaxis.title.text}`;
    section.querySelector("h3").textContent = title[0].toUpperCase() + title.slice(1);
    const data = variants.flatMap(({ label, style, curves: its }, variant) => {
      const run = x.value === "link" && isShown(variant) && runOf(variant);
      const at = run ? its.steps.map((step) => (step < run.at.length - 1 ? run.at[step] : run.wall)) : its[x.value];
      if (!isShown(variant) || !at) return [];
      const known = [...at.keys()].filter((i) => its[y.value][i] !== null && (xaxis.type !== "log" || at[i] > 0));
      // Of points at one place (nothing was sent between them) the last one.
      const kept = known.filter((i, n) => at[i] !== at[known[n + 1]]);
      const [xs, ys, error] = [at, its[y.value], its[`${y.value} error`]].map((values) => values && kept.map((i) => values[i]));
      return { name: label, mode: kept.length > 20 ? "lines" : "lines+markers", x: xs, y: ys, error, meta: style };
    });
    return { data, layout: { xaxis, yaxis } };
  };
  page.figure = (section) => {
    if (section.matches(".curves")) return curves(section);
    const { data, layout } = JSON.parse(section.querySelector("script").textContent);
    return { data: data.filter(({ meta }) => isShown(meta.variant)), layout };
  };
  let asked = 0;
  const renew = () => {
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(() => (play(), page.redraw()));
  };
  document.querySelectorAll("[data-tick]").forEach((button) => button.addEventListener("click", () => {
    boxes.forEach((box) => (box.checked = button.dataset.tick.split(" ").includes(box.dataset.variant)));
    renew();
  }));
  document.querySelectorAll("#link input[type=range]").forEach((slider) => {
    const exact = slider.nextElementSibling;
    slider.addEventListener("input", () => (exact.value = Number((10 ** slider.value).toPrecision(3))));
    exact.addEventListener("input", () => exact.value > 0 && (slider.value = Math.log10(exact.value)));
  });
  controls.forEach((control) => control.addEventListener("input", renew));

  // A page that is written anew while its runs go on loads itself again.
  const field = (control) => (control.type === "checkbox" ? "checked" : "value");
  const place = `thinwire ${location.pathname}`;
  // A browser may refuse its storage to a page that was opened from a file: then nothing is kept.
  const stored = (work) => { try { return work(sessionStorage); } catch { return null; } };
  const before = stored((store) => JSON.parse(store.getItem(place)));
  stored((store) => store.removeItem(place));
  if (before) {
    controls.forEach((its) => (its[field(its)] = before.kept[its.dataset.keep] ?? its[field(its)]));
    controls.filter((its) => its.selectedIndex < 0).forEach((its) => (its.selectedIndex = 0));
    addEventListener("load", () => scrollTo({ top: before.scroll, behavior: "instant" }));
  }
  play();
  const live = find("live");
  if (!live) return;
  const pause = live.querySelector("button");
  pause.addEventListener("click", () => (pause.ariaPressed = String(pause.ariaPressed !== "true")));
  let touched = 0;
  const touch = () => (touched = Date.now());
  ["input", "keydown", "pointerdown", "wheel", "touchmove"].forEach((kind) => addEventListener(kind, touch, { passive: true }));
  const every = 1000 * Number(live.dataset.every);
  // Not under the hands of its reader, and not where it is not seen.
  const again = () => {
    const isBusy = document.hidden || Date.now() - touched < Math.min(every, 2000) || pause.ariaPressed === "true";
    if (isBusy) return setTimeout(again, Math.min(every, 1000));
    const kept = Object.fromEntries(controls.map((its) => [its.dataset.keep, its[field(its)]]));
    stored((store) => store.setItem(place, JSON.stringify({ kept, scroll: scrollY })));
    return location.reload();
  };
  setTimeout(again, every);
})();
