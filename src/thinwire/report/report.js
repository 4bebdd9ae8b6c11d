"use strict";
// What a report does when its reader chooses something: chart.js draws what `adapt` returns.
(() => {
  let read = null; // by what is drawn first
  const variants = () =>
    (read ??= JSON.parse(document.getElementById("report-data").textContent).variants);
  const find = (name) => document.getElementById(name);
  const colours = { computing: 0, hidden: 2, waiting: 1, transfer: 2 };
  const patterns = { computing: "", hidden: "/", waiting: "x", transfer: "" };
  const boxes = [...document.querySelectorAll("input[data-variant]")];
  const ticked = () =>
    boxes.filter((box) => box.checked).map((box) => Number(box.dataset.variant));
  const shown = new Set(ticked());
  let chosenLink = null;
  const played = new Map();

  const duration = (seconds) => thinwire.duration(seconds);
  const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;

  // -- the link ------------------------------------------------------------------------------------

  const number = (name) => {
    const value = Number(find(name)?.value);
    return Number.isFinite(value) ? value : NaN;
  };
  const link = () => ({
    rate: number("bandwidth") * 1e6,
    latency: number("latency") / 1e3,
    step: number("step") / 1e3,
    topology: find("topology").value,
  });

  const play = () => {
    if (!find("link")) return;
    const { rate, latency, step, topology } = link();
    const sound = rate > 0 && latency >= 0 && step > 0;
    find("link-told").textContent = sound
      ? ""
      : "Bandwidth and step take more than 0, latency 0 or more: the charts show the last link.";
    if (!sound) return;
    chosenLink = { rate, latency, step, topology };
    played.clear();
  };
  // Of many methods only those that are looked at are played.
  const runOf = (variant) => {
    const { replay } = variants()[variant] ?? {};
    if (!replay || !chosenLink) return null;
    if (!played.has(variant)) {
      const run = thinwire.simulate(replay, chosenLink);
      played.set(variant, { at: run.at, wall: run.wall, shares: thinwire.shares(run) });
    }
    return played.get(variant);
  };

  const tell = () => {
    document.querySelectorAll("#on-link tbody tr").forEach((row) => {
      const found = runOf(Number(row.querySelector("th").dataset.value));
      if (!found) return;
      const { computing, waiting, hidden } = found.shares;
      const cells = [
        [duration(found.wall), found.wall],
        [percent(computing / found.wall), computing / found.wall],
        [duration(waiting), waiting],
        [duration(hidden), hidden],
      ];
      [...row.querySelectorAll("td")].forEach((cell, index) => {
        [cell.textContent, cell.dataset.value] = cells[index];
      });
    });
  };

  // -- charts --------------------------------------------------------------------------------------

  const chosenLoss = () => document.querySelector("input[name=loss]:checked").value;
  const wanted = ({ meta }) => meta.variant === undefined || shown.has(meta.variant);

  // `at` says where the points of a variant's curve lie.
  const curves = (figure, at) => ({
    data: variants().flatMap(({ label, curves: found, style }, variant) => {
      const curve = found[chosenLoss()];
      const x = shown.has(variant) && curve.steps.length ? at(curve, variant) : null;
      const mode = curve.steps.length <= 20 ? "lines+markers" : "lines";
      const { y, error } = curve;
      return x ? [{ type: "scatter", mode, name: label, x, y, error, meta: style }] : [];
    }),
    layout: figure.layout,
  });
  const against = (figure) => curves(figure, (curve) => curve[figure.layout.meta.against]);
  const onLink = (figure) =>
    curves(figure, ({ steps }, variant) => {
      const run = runOf(variant);
      if (!run) return null;
      const { at, wall } = run;
      return steps.map((step) => (step >= at.length - 1 ? wall : at[step]));
    });

  const bar = (kind, name, values) => ({
    type: "bar",
    name,
    ...values,
    meta: { series: colours[kind] },
    pattern: patterns[kind],
  });

  const shares = (figure) => {
    const runs = [...shown]
      .map((variant) => ({ run: runOf(variant), variant }))
      .filter(({ run }) => run)
      .sort((one, other) => other.variant - one.variant);
    const y = runs.map(({ variant }) => variants()[variant].label);
    const of = (pick) => ({ y, x: runs.map(({ run }) => pick(run.shares) / run.wall) });
    return {
      data: [
        bar("computing", "computing, link idle", of((s) => s.computing - s.hidden)),
        bar("hidden", "computing, link busy (hidden)", of((s) => s.hidden)),
        bar("waiting", "waiting", of((s) => s.waiting)),
      ],
      layout: { ...figure.layout, height: 110 + 30 * runs.length },
    };
  };

  // At least twelve steps from the middle of the run.
  const timeline = (figure) => {
    const variant = number("timeline-variant");
    const { replay } = variants()[variant] ?? {};
    if (!replay || !chosenLink) return { data: [], layout: figure.layout };
    const { every, steps } = replay;
    const middle = Math.max(0, Math.floor(steps / 2 / every) * every - every);
    const run = thinwire.simulate(replay, chosenLink);
    const last = Math.min(steps, middle + Math.max(3 * every, 12));
    const [from, to] = [run.at[middle], run.at[last]];
    const cut = (intervals) =>
      intervals
        .map((i) => ({ from: Math.max(i.from, from), to: Math.min(i.to, to) }))
        .filter((i) => i.to > i.from);
    const waits = cut(run.waits);
    const ends = [...waits.map((wait) => wait.from), to];
    const starts = [from, ...waits.map((wait) => wait.to)];
    const trains = starts.map((start, index) => ({ from: start, to: ends[index] }));
    const row = (kind, name, lane, intervals) => {
      const kept = intervals.filter((i) => i.to - i.from > 1e-12);
      return bar(kind, name, {
        y: kept.map(() => lane),
        base: kept.map((i) => i.from - from),
        x: kept.map((i) => i.to - i.from),
      });
    };
    find("timeline-told").textContent =
      `${variants()[variant].label}, inner steps ${middle + 1} to ${last} of ${steps}: ` +
      `${duration(to - from)}, of which ${duration(waits.reduce((t, w) => t + w.to - w.from, 0))} ` +
      `waiting.`;
    return {
      data: [
        row("transfer", "exchange on the link", "link", cut(run.transfers)),
        row("computing", "computing", "worker", trains),
        row("waiting", "waiting", "worker", waits),
      ],
      layout: figure.layout,
    };
  };

  const drawings = { curves: against, link: onLink, shares, timeline };
  thinwire.adapt = (figure) => {
    const drawing = drawings[figure.layout.meta?.draw];
    if (drawing) return drawing(figure);
    // Names beside points have no room on a phone; the legend has their symbols.
    const bare = (trace) =>
      trace.mode === "markers+text" && innerWidth < 600 ? { ...trace, mode: "markers" } : trace;
    return { data: figure.data.filter(wanted).map(bare), layout: figure.layout };
  };

  // -- the reader ----------------------------------------------------------------------------------

  let asked = false;
  const later = (work) => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
  const redraw = () => later(() => thinwire.refresh());
  const replayAll = () =>
    later(() => {
      play();
      thinwire.refresh();
    });

  const look = () => {
    shown.clear();
    ticked().forEach((variant) => shown.add(variant));
    redraw();
  };
  boxes.forEach((box) => box.addEventListener("change", look));
  document.querySelectorAll("button[data-tick]").forEach((button) =>
    button.addEventListener("click", () => {
      const ticked = button.dataset.tick.split(" ");
      boxes.forEach((box) => (box.checked = ticked.includes(box.dataset.variant)));
      look();
    }),
  );
  document.querySelectorAll("button[data-family]").forEach((button) =>
    button.addEventListener("click", () => {
      const members = button.dataset.family.split(" ");
      const its = boxes.filter((box) => members.includes(box.dataset.variant));
      const every = its.every((box) => box.checked);
      its.forEach((box) => (box.checked = !every));
      look();
    }),
  );
  document
    .querySelectorAll("input[name=loss]")
    .forEach((choice) => choice.addEventListener("change", redraw));
  for (const name of find("link") ? ["bandwidth", "latency", "step"] : []) {
    const [exact, slider] = [find(name), find(`${name}-range`)];
    slider.addEventListener("input", () => {
      exact.value = Number((10 ** Number(slider.value)).toPrecision(3));
      replayAll();
    });
    exact.addEventListener("input", () => {
      if (number(name) > 0) slider.value = Math.log10(number(name));
      replayAll();
    });
  }
  find("topology")?.addEventListener("change", replayAll);
  find("timeline-variant")?.addEventListener("change", redraw);
  play();
  if (find("on-link")) thinwire.lazily(find("on-link").querySelector("table"), tell);
})();
