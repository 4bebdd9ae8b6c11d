"use strict";
// Draws the figures of a page as SVG, whose colours page.css gives, so that they follow a light or
// dark scheme by themselves. thinwire.report.traces says what a figure is.
(() => {
  const dashes = ["", "9 6", "2.5 5", "9 4 2.5 4", "14 6", "14 4 2.5 4"];
  const symbols = [
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "M-4 -4h8v8h-8z",
    "M0 -5l5 5l-5 5l-5 -5z",
    "M0 -5l5 9h-10z",
    "M0 5l5 -9h-10z",
    "M-1.5 -5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
    "M-3 -5l3 3l3 -3l2 2l-3 3l3 3l-2 2l-3 -3l-3 3l-2 -2l3 -3l-3 -3z",
  ];
  const page = (globalThis.thinwire ??= {});
  const adapt = page.adapt ?? ((figure) => figure);
  const character = 7; // pixels of an average one at 12 px
  const escaped = (text) =>
    String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const short = (text, room) => (text.length <= room ? text : `${text.slice(0, Math.max(1, room - 1))}…`);
  const tidy = (number) => Math.round(number * 100) / 100;

  // -- numbers -------------------------------------------------------------------------------------

  const { three, prefixed } = page;
  const formats = {
    bytes: (value) => prefixed(value, "B"),
    percent: (value) => `${three(100 * value)} %`,
    duration: (value) => page.duration(value),
    seconds: (value) => `${three(value)} s`,
    loss: (value) => value.toFixed(4),
    si: (value, { unit = "" }) => prefixed(value, unit),
  };
  const plain = (value) => Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 });
  const said = (value, axis) => (formats[axis.format] ?? plain)(value, axis);

  // -- axes ----------------------------------------------------------------------------------------

  const few = [1, 2, 5, 10, 20, 30];
  const powers = (from, to, digits) =>
    Array.from({ length: to - from + 1 }, (_, i) => digits.map((n) => n * 10 ** (from + i))).flat();
  const moments = [
    ...powers(-6, -1, [1, 2, 5]),
    ...few,
    ...few.map((n) => 60 * n),
    ...[1, 2, 5, 12].map((n) => 3600 * n),
    ...powers(0, 5, [1, 2, 5]).map((n) => 86400 * n),
  ];
  const thinned = (values, room) => {
    const every = Math.ceil(values.length / Math.max(2, room));
    return values.filter((_, index) => index % every === 0);
  };
  const ticksOf = (axis, [low, high], room) => {
    const within = (values) => values.filter((v) => v >= low * (1 - 1e-9) && v <= high * (1 + 1e-9));
    if (axis.tickvals) return thinned(within(axis.tickvals), room);
    if (axis.type === "log") {
      if (axis.format === "duration") return thinned(within(moments), room);
      const [from, to] = [low, high].map((v) => Math.floor(Math.log10(v)));
      const decades = within(powers(from, to, [1]));
      return thinned(decades.length > 2 ? decades : within(powers(from, to, [1, 2, 5])), room);
    }
    const raw = (high - low) / Math.max(2, room);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((n) => n * power).find((each) => each >= raw * 0.999);
    const first = Math.ceil(low / step - 1e-9);
    const count = Math.floor(high / step + 1e-9) - first + 1;
    return Array.from({ length: count }, (_, i) => Number(((first + i) * step).toPrecision(12)));
  };
  const tickText = (axis, value) => {
    if (axis.ticktext) return axis.ticktext[axis.tickvals.indexOf(value)];
    return axis.format && axis.format !== "loss" ? said(value, axis) : plain(value);
  };
  const span = (axis, values) => {
    if (axis.range) return axis.range;
    const log = axis.type === "log";
    const at = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
    if (!at.length) return log ? [1, 10] : [0, 1];
    let [low, high] = at.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    if (axis.rangemode === "tozero") low = Math.min(0, low);
    if (log) {
      const pad = Math.max(1.08, (high / low) ** 0.04);
      return [low / pad, high * pad];
    }
    const pad = 0.04 * (high - low || Math.abs(high) || 1);
    return [low === 0 ? 0 : low - pad, high + pad];
  };
  const scale = (axis, [low, high], from, to) => {
    const of = axis.type === "log" ? Math.log10 : (value) => value;
    const [a, b] = [of(low), of(high)];
    const place = (value) => from + ((of(value) - a) / (b - a)) * (to - from);
    const value = (pixel) => {
      const found = a + ((pixel - from) / (to - from)) * (b - a);
      return axis.type === "log" ? 10 ** found : found;
    };
    return { place, value };
  };

  // -- a figure ------------------------------------------------------------------------------------

  const styleOf = ({ meta = {}, line = {} }) => {
    const { series, dash = series } = meta;
    const colour = series === undefined ? "var(--muted)" : `var(--series-${series % 8})`;
    return {
      colour,
      dash: line.dash ?? dashes[(dash ?? 2) % 6],
      symbol: symbols[(dash ?? 0) % 7],
      width: line.width ?? 2.5,
    };
  };

  const lanesOf = (figure) => {
    const bars = figure.data.filter(({ type }) => type === "bar");
    if (!bars.length && !figure.layout.yaxis.categoryarray) return null;
    return figure.layout.yaxis.categoryarray ?? [...new Set(bars.flatMap(({ y }) => y))];
  };

  // Bars as rectangles in the units of their axis and the number of their lane.
  const barsOf = (figure, lanes) => {
    const ends = new Map();
    return figure.data.flatMap((trace, series) =>
      trace.x.map((length, index) => {
        const lane = lanes.indexOf(trace.y[index]);
        const from = trace.base?.[index] ?? ends.get(lane) ?? 0;
        ends.set(lane, from + length);
        return { trace, series, lane, from, length };
      }),
    );
  };

  const legendOf = (figure, hidden) =>
    figure.all
      .map((trace, index) => ({ trace, index }))
      .filter(({ trace }) => trace.name && trace.meta?.series !== undefined)
      .map(({ trace, index }) => {
        const { colour, dash, symbol, width } = styleOf(trace);
        const swatch =
          trace.type === "bar"
            ? `<rect y="1" width="34" height="12" fill="${colour}"/>${hatched(trace.pattern, 0, 1, 34, 12)}`
            : `<path d="M0 7H34" stroke="${colour}" stroke-width="${width}" stroke-dasharray="${dash}"/>` +
              `<path d="${symbol}" transform="translate(17 7)" fill="${colour}"/>`;
        return (
          `<button type="button" aria-pressed="${!hidden.has(index)}" data-trace="${index}">` +
          `<svg width="34" height="14" aria-hidden="true">${swatch}</svg>${escaped(trace.name)}</button>`
        );
      })
      .join("");

  // Lines across a bar tell its kind without its colour.
  const hatched = (pattern, x, y, width, height) => {
    if (!pattern) return "";
    let path = "";
    for (let at = -height; at < width; at += 8) {
      const [a, b] = [Math.max(at, 0), Math.min(at + height, width)];
      if (b <= a) continue;
      path += `M${tidy(x + a)} ${tidy(y + height - (a - at))}L${tidy(x + b)} ${tidy(y + height - (b - at))}`;
      if (pattern === "x") path += `M${tidy(x + a)} ${tidy(y + (a - at))}L${tidy(x + b)} ${tidy(y + (b - at))}`;
    }
    return `<path class="hatch" d="${path}"/>`;
  };

  // Where names go beside points, each where it covers no other; those without room are left out.
  const namesOf = (points, box) => {
    const taken = points.map(({ px, py }) => [px - 6, py - 6, px + 6, py + 6]);
    const free = ([a, b, c, d]) =>
      a >= box.left && c <= box.right && b >= 0 && d <= box.bottom &&
      taken.every(([e, f, g, h]) => c <= e || a >= g || d <= f || b >= h);
    return points
      .map(({ px, py, label }) => {
        const wide = label.length * character * 0.95;
        const places = [
          [px + 9, py - 7, "start"], [px - 9, py - 7, "end"],
          [px + 9, py + 16, "start"], [px - 9, py + 16, "end"],
        ];
        for (const [x, y, anchor] of places) {
          const left = anchor === "start" ? x : x - wide;
          const room = [left, y - 11, left + wide, y + 3];
          if (!free(room)) continue;
          taken.push(room);
          return `<text class="name" x="${tidy(x)}" y="${tidy(y)}" text-anchor="${anchor}">${escaped(label)}</text>`;
        }
        return "";
      })
      .join("");
  };

  const drawn = (figure, width, height, view, name) => {
    const { xaxis, yaxis } = figure.layout;
    const lanes = lanesOf(figure);
    const bars = lanes ? barsOf(figure, lanes) : [];
    const lines = lanes ? [] : figure.data;
    const marks = figure.layout.marks ?? [];
    const ends = (of) =>
      lines.flatMap((trace) => of(trace)).concat(marks.flatMap(({ y, x }) => [of({ x: [x], y: [y] })].flat()));
    const spread = ({ y, error }) =>
      error ? y.flatMap((value, i) => [value - error[i], value + error[i]]) : y;
    const domain = {
      x: view?.slice(0, 2) ?? span(xaxis, lanes ? [0, ...bars.map((b) => b.from + b.length)] : ends(({ x }) => x)),
      y: view?.slice(2, 4) ?? span(yaxis, ends(spread).filter((v) => v !== undefined)),
    };
    const room = lanes ? Math.floor((width * 0.4) / character) : 30;
    const yticks = lanes ? [] : ticksOf(yaxis, domain.y, (height - 70) / 55);
    const ytexts = lanes ? lanes.map((lane) => short(lane, room)) : yticks.map((v) => tickText(yaxis, v));
    const left = Math.max(24, ...ytexts.map((t) => t.length * character)) + 12;
    const box = { left, right: width - 14, top: 26, bottom: height - 46 };
    const x = scale(xaxis, domain.x, box.left, box.right);
    const y = lanes
      ? { place: (lane) => box.bottom - ((lane + 0.5) * (box.bottom - box.top)) / lanes.length }
      : scale(yaxis, domain.y, box.bottom, box.top);
    const xticks = ticksOf(xaxis, domain.x, Math.min(10, (box.right - box.left) / 95));

    const out = [];
    const grid = (a, b, c, d) => out.push(`<path class="grid" d="M${tidy(a)} ${tidy(b)}L${tidy(c)} ${tidy(d)}"/>`);
    const text = (px, py, anchor, content, kind = "") =>
      out.push(`<text class="${kind}" x="${tidy(px)}" y="${tidy(py)}" text-anchor="${anchor}">${escaped(content)}</text>`);
    xticks.forEach((tick) => {
      grid(x.place(tick), box.top, x.place(tick), box.bottom);
      const near = x.place(tick) > box.right - 24 ? "end" : "middle";
      text(x.place(tick), box.bottom + 17, near, tickText(xaxis, tick));
    });
    ytexts.forEach((content, i) => {
      const at = y.place(lanes ? i : yticks[i]);
      if (!lanes) grid(box.left, at, box.right, at);
      text(box.left - 7, at + 4, "end", content);
    });
    text((box.left + box.right) / 2, height - 8, "middle", short(xaxis.title?.text ?? "", (box.right - box.left) / 6), "axis");
    text(2, 14, "start", yaxis.title?.text ?? "", "axis");
    out.push(`<clipPath id="${name}"><rect x="${box.left}" y="${box.top - 6}" width="${Math.max(1, box.right - box.left + 8)}" height="${box.bottom - box.top + 12}"/></clipPath>`);
    out.push(`<g clip-path="url(#${name})">`);

    const points = [];
    const named = [];
    const inside = (px, py) => px >= box.left - 1 && px <= box.right + 1 && py >= box.top - 6 && py <= box.bottom + 6;
    const sound = (trace, i) => Number.isFinite(trace.y[i]) && (xaxis.type !== "log" || trace.x[i] > 0);
    lines.forEach((trace, series) => {
      const { colour, dash, symbol, width: thick } = styleOf(trace);
      const kept = trace.x.map((_, i) => i).filter((i) => sound(trace, i));
      const at = kept.map((i) => [tidy(x.place(trace.x[i])), tidy(y.place(trace.y[i]))]);
      const error = trace.error ?? [];
      if (trace.mode.includes("lines") && error.length && trace.error.some(Boolean) && !trace.bars) {
        const edge = (sign) => kept.map((i, n) => `${at[n][0]} ${tidy(y.place(trace.y[i] + sign * error[i]))}`);
        out.push(`<path class="band" fill="${colour}" d="M${[...edge(1), ...edge(-1).reverse()].join("L")}z"/>`);
      } else {
        kept.filter((i) => error[i]).forEach((i) => {
          const [px, up, down] = [x.place(trace.x[i]), y.place(trace.y[i] + error[i]), y.place(trace.y[i] - error[i])];
          out.push(`<path stroke="${colour}" stroke-width="1.5" d="M${tidy(px - 4)} ${tidy(up)}h8m-4 0V${tidy(down)}m-4 0h8"/>`);
        });
      }
      if (trace.mode.includes("lines") && at.length) {
        const path = trace.line?.shape === "hv"
          ? at.map(([px, py], n) => (n ? `H${px}V${py}` : `M${px} ${py}`)).join("")
          : `M${at.map((pair) => pair.join(" ")).join("L")}`;
        out.push(`<path class="line" stroke="${colour}" stroke-width="${thick}" stroke-dasharray="${dash}" d="${path}"/>`);
      }
      if (trace.mode.includes("markers")) {
        const size = trace.mode === "lines+markers" ? 0.8 : 1.25;
        at.forEach(([px, py]) =>
          out.push(`<path fill="${colour}" d="${symbol}" transform="translate(${px} ${py}) scale(${size})"/>`),
        );
      }
      if (trace.hoverinfo === "skip") return;
      kept.forEach((i, n) => {
        const [px, py] = at[n];
        if (!inside(px, py)) return;
        const about = error[i] ? ` ± ${said(error[i], yaxis)}` : "";
        const told = `${said(trace.x[i], xaxis)}, ${said(trace.y[i], yaxis)}${about}`;
        points.push({ series, px, py, name: trace.name, told, x: trace.x[i], y: trace.y[i] });
        if (trace.mode.includes("text")) named.push({ px, py, label: trace.name });
      });
    });
    bars.forEach(({ trace, series, lane, from, length }) => {
      const tall = ((box.bottom - box.top) / lanes.length) * 0.62;
      const [a, b] = [x.place(from), x.place(from + length)];
      const top = y.place(lane) - tall / 2;
      const wide = Math.max(b - a, 0.5);
      out.push(
        `<rect x="${tidy(a)}" y="${tidy(top)}" width="${tidy(wide)}" height="${tidy(tall)}" fill="${styleOf(trace).colour}"/>`,
        hatched(trace.pattern, a, top, wide, tall),
      );
      const begins = trace.base ? `, from ${said(from, xaxis)}` : "";
      const told = `${lanes[lane]}: ${said(length, xaxis)}${begins}`;
      points.push({ series, px: (a + b) / 2, py: y.place(lane), half: [(b - a) / 2, tall / 2], name: trace.name, told, x: from, y: lane });
    });
    marks.forEach((mark) => {
      const vertical = mark.x !== undefined;
      const at = vertical ? x.place(mark.x) : y.place(mark.y);
      const path = vertical ? `M${tidy(at)} ${box.top}V${box.bottom}` : `M${box.left} ${tidy(at)}H${box.right}`;
      out.push(`<path class="mark" d="${path}"/>`);
      const [px, py] = vertical ? [at + 5, box.top + 11] : [box.left + 5, at - 5];
      text(px, py, vertical && at > box.right - 60 ? "end" : "start", mark.text, "name");
    });
    if (!bars.length && !lines.some((trace) => trace.x.length)) {
      text((box.left + box.right) / 2, (box.top + box.bottom) / 2, "middle", "None of the methods shown has this.", "axis");
    }
    out.push("</g>", namesOf(named, box));
    return { markup: out.join(""), points, box, x, y, domain, lanes };
  };

  // -- a chart and its reader ----------------------------------------------------------------------

  document.querySelectorAll(".chart").forEach((section, number) => {
    const plot = section.querySelector(".plot");
    let figure = null; // read when it is drawn
    const told = section.querySelector(".point");
    const legend = section.querySelector(".legend");
    const reset = section.querySelector("button.reset");
    const hidden = new Set();
    let now = null; // what is drawn
    let chosen = -1; // a point of it
    let view = null;
    let dragged = null;

    const draw = (width) => {
      figure ??= JSON.parse(section.querySelector("script").textContent);
      const whole = adapt(figure);
      const adapted = { ...whole, all: whole.data, data: whole.data.filter((_, i) => !hidden.has(i)) };
      const height = adapted.layout.height ?? plot.clientHeight;
      now = drawn(adapted, width, height, view, `clip-${number}`);
      plot.data = adapted.data;
      plot.style.height = `${height}px`;
      plot.innerHTML =
        `<svg class="drawing" role="img" aria-label="${escaped(plot.dataset.alt)}" width="${width}" height="${height}"` +
        ` viewBox="0 0 ${width} ${height}">${now.markup}<path class="here" d=""/><rect class="zoom" width="0" height="0"/></svg>`;
      if (adapted.layout.legend) legend.innerHTML = legendOf(adapted, hidden);
      reset.hidden = !view;
      point(-1);
    };
    const redraw = () => draw(plot.clientWidth);

    const point = (index) => {
      chosen = index;
      const its = now.points[index];
      const here = plot.querySelector(".here");
      told.textContent = its ? `${its.name}: ${its.told}` : "";
      if (!its) return here.setAttribute("d", "");
      here.setAttribute("d", `M${its.px - 7} ${its.py}a7 7 0 1 0 14 0a7 7 0 1 0 -14 0`);
      const wide = Math.min(told.offsetWidth, now.box.right);
      told.style.left = `${Math.max(0, Math.min(its.px + 10, now.box.right - wide))}px`;
      return (told.style.top = `${plot.offsetTop + its.py + (its.py > 70 ? -told.offsetHeight - 10 : 14)}px`);
    };
    const nearest = (px, py) => {
      const far = ({ px: a, py: b, half = [0, 0] }) =>
        Math.hypot(Math.max(0, Math.abs(px - a) - half[0]), Math.max(0, Math.abs(py - b) - half[1]));
      const found = now.points.reduce((best, its, i) => (far(its) < best[0] ? [far(its), i] : best), [40, -1]);
      return found[1];
    };
    const place = (event) => {
      const rect = plot.getBoundingClientRect();
      return [event.clientX - rect.left, event.clientY - rect.top];
    };
    const look = (its) => {
      view = its;
      if (view) section.dataset.view = JSON.stringify(view);
      else delete section.dataset.view;
      redraw();
    };

    plot.addEventListener("pointermove", (event) => {
      if (!now) return;
      const [px, py] = place(event);
      if (!dragged) return point(nearest(px, py));
      const zoom = plot.querySelector(".zoom");
      const [a, b] = [Math.min(px, dragged[0]), Math.min(py, dragged[1])];
      const size = { x: a, y: b, width: Math.abs(px - dragged[0]), height: Math.abs(py - dragged[1]) };
      return Object.entries(size).forEach(([name, value]) => zoom.setAttribute(name, value));
    });
    plot.addEventListener("pointerleave", () => now && point(-1));
    plot.addEventListener("pointerdown", (event) => {
      // A finger scrolls the page.
      if (event.pointerType === "touch" || event.button !== 0 || !now || now.lanes) return;
      dragged = place(event);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointerup", (event) => {
      if (!dragged) return;
      const [from, to] = [dragged, place(event)];
      dragged = null;
      plot.querySelector(".zoom").setAttribute("width", 0);
      if (Math.abs(from[0] - to[0]) < 8 || Math.abs(from[1] - to[1]) < 8) return;
      const range = (axis, a, b) => [axis.value(a), axis.value(b)].sort((one, other) => one - other);
      look([...range(now.x, from[0], to[0]), ...range(now.y, from[1], to[1])]);
    });
    plot.addEventListener("dblclick", () => look(null));
    reset.addEventListener("click", () => {
      look(null);
      plot.focus();
    });
    legend.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const index = Number(button.dataset.trace);
      if (!hidden.delete(index)) hidden.add(index);
      redraw();
      legend.querySelector(`[data-trace="${index}"]`)?.focus();
    });

    // Left and right read the points of a line, up and down change the line.
    const moved = (key) => {
      const its = now.points;
      if (!its.length) return -1;
      if (chosen < 0) return 0;
      if (key === "ArrowRight" || key === "ArrowLeft") {
        const next = chosen + (key === "ArrowRight" ? 1 : -1);
        return its[next]?.series === its[chosen].series ? next : chosen;
      }
      const order = [...new Set(its.map(({ series }) => series))];
      const step = order.indexOf(its[chosen].series) + (key === "ArrowDown" ? 1 : -1);
      const series = order[(step + order.length) % order.length];
      const other = its.map((p, i) => [p, i]).filter(([p]) => p.series === series);
      const away = ([p]) => Math.abs(p.px - its[chosen].px);
      return other.reduce((best, each) => (away(each) < away(best) ? each : best))[1];
    };
    const zoomed = (factor) => {
      const centre = now.points[chosen];
      const about = (axis, [low, high], at) => {
        const [a, b, c] = [axis.place(low), axis.place(high), axis.place(at)];
        return [axis.value(c + (a - c) * factor), axis.value(c + (b - c) * factor)];
      };
      if (centre && !now.lanes) {
        look([...about(now.x, now.domain.x, centre.x), ...about(now.y, now.domain.y, centre.y)]);
        point(now.points.findIndex(({ name, x, y }) => name === centre.name && x === centre.x && y === centre.y));
      }
    };
    plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !now) return;
      if (event.key.startsWith("Arrow")) point(moved(event.key));
      else if (event.key === "+") zoomed(0.5);
      else if (event.key === "-") zoomed(2);
      else if (event.key === "0") look(null);
      else if (event.key === "Escape") point(-1);
      else return;
      event.preventDefault();
    });
    plot.addEventListener("blur", () => now && point(-1));
    section.addEventListener("view", () => look(JSON.parse(section.dataset.view)));
    let known = null; // the width that is drawn; none where a fold hides it
    page.lazily(plot, () => {
      known = plot.clientWidth;
      if (known) draw(known);
    });
    // Also when only its column changes: a scroll bar that appears narrows the page alone.
    const resized = new ResizeObserver(() => {
      if (known !== null && plot.clientWidth !== known) page.refresh([plot]);
    });
    resized.observe(plot);
  });
})();
