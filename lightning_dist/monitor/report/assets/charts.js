// Curves over the run, one small plot a metric, with a cursor that pointer, touch and arrow keys move.
const FOOT = 18, HEAD = 8, SIDE = 58;

function plot(box, caption, { height = 128, horizontal, range, most, form, label, limit, paths, readings }) {
  const idle = caption.textContent;
  let cursor = null, line = null, low = 0, high = 1, width = 0;
  const x = (value) => SIDE + ((value - low) / (high - low || 1)) * (width - SIDE - 4);

  function draw() {
    width = box.clientWidth;
    if (!width) return;
    const points = horizontal(), ends = range();
    low = Math.min(...ends);
    high = Math.max(...ends);
    const { top, each } = ticks(Math.max(most(), limit ?? 0), 3);
    const y = (value) => HEAD + (1 - Math.min(value, top) / top) * (height - HEAD - FOOT);
    const svg = drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": label });
    for (const value of marks(0, top * 1.0001, each)) {
      svg.append(drawn("line", { class: "grid", x1: SIDE, x2: width, y1: y(value), y2: y(value) }));
      svg.append(drawn("text", { x: SIDE - 6, y: y(value) + 4, "text-anchor": "end" }, short(said(value, form))));
    }
    across(svg);
    for (const { path, name } of paths(x, y)) svg.append(drawn("path", { class: name, d: path }));
    happened(svg);
    if (limit !== undefined) svg.append(drawn("line", { class: "limit", x1: SIDE, x2: width, y1: y(limit), y2: y(limit) }));
    line = drawn("line", { class: "cursor", y1: HEAD, y2: height - FOOT, visibility: "hidden" });
    svg.append(line);
    listen(svg, points);
    box.replaceChildren(svg);
    if (cursor !== null) point(points, Math.min(cursor, points.length - 1));
  }

  function across(svg) {
    const { each } = ticks(high - low, Math.max(2, Math.floor(width / 130)));
    for (const value of marks(low, high, each)) {
      const near = x(value) > width - 24;
      const text = axisName() === "time" ? short(seconds(value)) : String(Math.round(value));
      svg.append(drawn("text", { x: x(value), y: height - 3, "text-anchor": near ? "end" : "middle" }, text));
    }
  }

  function happened(svg) {
    for (const [step, time, title] of data.incidents) {
      const at = axisName() === "time" ? time : step;
      if (at === null || at < low || at > high) continue;
      const mark = drawn("line", { class: "incident", x1: x(at), x2: x(at), y1: HEAD, y2: height - FOOT });
      mark.append(drawn("title", {}, title));
      svg.append(mark);
    }
  }

  function point(points, index) {
    cursor = index;
    if (index === null || !points.length) {
      line.setAttribute("visibility", "hidden");
      caption.textContent = idle;
      return;
    }
    line.setAttribute("visibility", "visible");
    line.setAttribute("x1", x(points[index]));
    line.setAttribute("x2", x(points[index]));
    caption.textContent = readings(index);
  }

  function listen(svg, points) {
    const nearest = (value) => {
      let best = 0;
      for (let index = 1; index < points.length; index += 1) {
        if (Math.abs(points[index] - value) < Math.abs(points[best] - value)) best = index;
      }
      return best;
    };
    const follow = (event) => {
      const place = event.clientX - svg.getBoundingClientRect().left;
      point(points, nearest(low + ((place - SIDE) / (width - SIDE - 4)) * (high - low)));
    };
    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    svg.addEventListener("pointerleave", () => point(points, null));
    svg.addEventListener("blur", () => point(points, null));
    svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const next = cursor === null ? (by > 0 ? 0 : points.length - 1) : cursor + by;
      point(points, Math.min(points.length - 1, Math.max(0, next)));
    });
  }

  redrawn(box, draw);
  return draw;
}

const axisName = () => document.getElementById("axis").value;
const highlighted = () => document.getElementById("highlight").value;

function through(xs, ys, x, y) {
  let path = "";
  for (let index = 0; index < xs.length; index += 1) {
    path += `${index ? "L" : "M"}${x(xs[index]).toFixed(1)} ${y(ys[index]).toFixed(1)}`;
  }
  return xs.length === 1 ? `${path}h2` : path;
}

// Events rather than a curve: a line up from 0 for each.
function stems(xs, ys, x, y) {
  return xs.map((at, index) => `M${x(at).toFixed(1)} ${y(0).toFixed(1)}V${y(ys[index]).toFixed(1)}`).join("");
}

function between(xs, lows, highs, x, y) {
  const back = [...xs.keys()].reverse();
  return `${through(xs, highs, x, y)}L${back.map((at) => `${x(xs[at]).toFixed(1)} ${y(lows[at]).toFixed(1)}`).join("L")}Z`;
}

function curves(box) {
  const series = data.series.find(({ metric }) => metric === box.dataset.metric);
  const caption = box.parentElement.querySelector(".at");
  const marked = new Set(data.ranks.filter(([, , mark]) => mark).map(([rank]) => rank));
  const column = () => (axisName() === "time" ? 2 : 1);
  const draw = series.stems ? stems : through;
  const chosen = () => series.lines.find(([rank]) => String(rank) === highlighted());
  const base = () => (series.band ? [null, series.band[0], series.band[1], series.band[3]] : chosen() ?? series.lines[0]);
  const most = Math.max(0, ...series.lines.map((line) => line[3].reduce((a, b) => Math.max(a, b), 0)), ...(series.band ? series.band[4] : []));
  return plot(box, caption, {
    form: series.form,
    label: `${series.title}: ${caption.textContent}`,
    limit: series.limit,
    most: () => most,
    range: () => series.lines.flatMap((line) => [line[column()][0], line[column()].at(-1)]),
    horizontal: () => (series.band ? series.band[column() - 1] : base()[column()]),
    paths: (x, y) => {
      const found = [];
      if (series.band) {
        const xs = series.band[column() - 1];
        found.push({ name: "band", path: between(xs, series.band[2], series.band[4], x, y) });
        found.push({ name: "curve", path: through(xs, series.band[3], x, y) });
      }
      for (const line of series.lines) {
        const [rank] = line, name = line === chosen() ? "chosen" : marked.has(rank) ? "marked" : null;
        if (name || !series.band) found.push({ name: `curve ${name ?? ""}`, path: draw(line[column()], line[3], x, y) });
      }
      return found.sort((a, b) => a.name.includes("chosen") - b.name.includes("chosen"));
    },
    readings: (index) => {
      const [rank, steps, times, values] = base(), of = rank === null ? "median of ranks" : `rank ${rank}`;
      return `step ${steps[index]}, ${seconds(times[index])}: ${said(values[index], series.form)} (${of})`;
    },
  });
}

function phases(box) {
  const { steps, ends, times, phases: parts } = data.course;
  const caption = box.parentElement.querySelector(".at");
  const sums = [steps.map(() => 0)];
  for (const part of parts) sums.push(part.map((value, index) => value + sums[sums.length - 1][index]));
  return plot(box, caption, {
    height: 190,
    form: "s",
    label: "Phases of a step over the run, stacked",
    most: () => sums[sums.length - 1].reduce((a, b) => Math.max(a, b), 0),
    range: () => (axisName() === "time" ? [times[0], times.at(-1)] : [steps[0], ends.at(-1)]),
    horizontal: () => (axisName() === "time" ? times : steps),
    paths: (x, y) => parts
      .map((part, place) => ({ part, place }))
      .filter(({ part }) => part.some((value) => value > 0))
      .map(({ place }) => ({
        name: `p-${data.phases[place][0]}`,
        path: between(axisName() === "time" ? times : steps, sums[place], sums[place + 1], x, y),
      })),
    readings: (index) => {
      const largest = parts
        .map((part, place) => [part[index], data.phases[place][1]])
        .sort(([a], [b]) => b - a)
        .slice(0, 3)
        .filter(([value]) => value > 0)
        .map(([value, title]) => `${title} ${seconds(value)}`);
      const which = steps[index] === ends[index] ? `step ${steps[index]}` : `steps ${steps[index]} to ${ends[index]}`;
      return `${which}, ${seconds(times[index])}: ${seconds(sums[sums.length - 1][index])}; ${largest.join(", ")}`;
    },
  });
}
