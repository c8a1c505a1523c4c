// One step: a row a rank and lane, drawn on a canvas; zoomed and walked through by pointer, touch and keys.
const MAIN_HEIGHT = 22, LANE_HEIGHT = 14, GAP = 6, AXIS = 22;
const TALLEST = 16000; // pixels of a canvas; taller ones stay empty in some browsers

function timeline() {
  const canvas = document.getElementById("timeline");
  if (!canvas) return { show() {} };
  const which = document.getElementById("which"), lanes = document.getElementById("lanes");
  const output = document.getElementById("said"), kind = document.getElementById("kind");
  const context = canvas.getContext("2d");
  const marked = new Map(data.ranks.map(([rank, , mark]) => [rank, mark]));
  const hosts = new Map(data.ranks.map(([rank, host]) => [rank, host]));
  let at = data.first, from = 0, to = 1, rows = [], chosen = null;

  const step = () => data.steps[at];
  const gutter = () => (canvas.clientWidth < 520 ? 58 : 150);
  const span = () => Math.max(1, canvas.clientWidth - gutter());
  const x = (time) => gutter() + ((time - from) / (to - from)) * span();
  const timeAt = (place) => from + ((place - gutter()) / span()) * (to - from);

  function layout() {
    let y = AXIS, last = null;
    rows = [];
    for (const [rank, lane, boxes] of step().rows) {
      const main = lane === "main";
      if (!main && !lanes.checked) continue;
      if (rank !== last && last !== null) y += GAP;
      const height = main ? MAIN_HEIGHT : LANE_HEIGHT;
      rows.push({ rank, lane, boxes, y, height, main, first: rank !== last });
      last = rank;
      y += height + 1;
    }
    return y + GAP;
  }

  function show(index) {
    at = index;
    which.value = String(index);
    from = 0;
    to = step().us || 1;
    chosen = null;
    output.textContent = " ";
    const said = [];
    if (step().step === null) said.push("Mean of the settled steps: phases laid end to end, communication below, exposed last.");
    else if (!step().with_spans) said.push("Sums of this step's phases, laid end to end: their order within it was not kept.");
    if (step().aligned) said.push("Each rank begins at 0: the hosts' clocks differ by more than a step.");
    if (step().merged) said.push("Boxes too small to be told apart are joined.");
    kind.textContent = said.join(" ");
    draw();
  }

  function draw() {
    const colour = colours(), width = canvas.clientWidth, height = layout();
    if (!width) return;
    const ratio = Math.min(devicePixelRatio || 1, TALLEST / height);
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    axis(colour, height);
    for (const row of rows) label(row, colour);
    context.save();
    context.beginPath();
    context.rect(gutter(), 0, span(), height);
    context.clip();
    for (const row of rows) boxes(row, colour);
    if (chosen) outline(colour);
    context.restore();
  }

  function axis(colour, height) {
    const { each } = ticks(to - from, Math.max(2, Math.floor(span() / 110)));
    for (const time of marks(from, to, each)) {
      const place = Math.round(x(time)) + 0.5;
      context.strokeStyle = colour("rule");
      context.beginPath();
      context.moveTo(place, AXIS - 4);
      context.lineTo(place, height);
      context.stroke();
      const text = short(seconds(time / 1e6)), wide = context.measureText(text).width;
      context.fillStyle = colour("soft");
      context.fillText(text, Math.min(place, gutter() + span() - wide - 2), 10);
    }
  }

  function label(row, colour) {
    const middle = row.y + row.height / 2, narrow = gutter() < 100, mark = marked.get(row.rank);
    const lane = narrow ? row.lane.split(/[,.] ?/).pop() : row.lane;
    const text = row.main ? (narrow ? `${row.rank}` : `${row.rank}  ${hosts.get(row.rank) ?? ""}`) : lane;
    context.fillStyle = mark && row.main ? colour("mark") : colour(row.main ? "ink" : "soft");
    context.save();
    context.beginPath();
    context.rect(0, row.y, gutter() - 4, row.height);
    context.clip();
    context.fillText((mark && row.main ? "◆ " : "") + text, row.main ? 8 : narrow ? 8 : 18, middle);
    context.restore();
  }

  function boxes(row, colour) {
    context.fillStyle = colour("faint");
    context.fillRect(gutter(), row.y, span(), row.height);
    for (let index = 0; index < row.boxes.length; index += 3) {
      const start = row.boxes[index], end = start + row.boxes[index + 1];
      if (end < from || start > to) continue;
      const [title, name] = data.names[row.boxes[index + 2]], left = x(start), wide = Math.max(0.6, x(end) - left);
      context.fillStyle = colour(`p-${name}`);
      context.fillRect(left, row.y, wide > 3 ? wide - 0.6 : wide, row.height);
      const visible = Math.min(left + wide, gutter() + span()) - Math.max(left, gutter());
      if (row.height >= LANE_HEIGHT && visible > context.measureText(title).width + 10) {
        context.fillStyle = readable(colour(`p-${name}`));
        context.fillText(title, Math.max(left, gutter()) + 5, row.y + row.height / 2 + 0.5);
      }
    }
  }

  function outline(colour) {
    const row = rows[chosen.row];
    if (!row) return;
    const left = x(row.boxes[chosen.box]), wide = Math.max(2, x(row.boxes[chosen.box] + row.boxes[chosen.box + 1]) - left);
    context.strokeStyle = colour("ink");
    context.lineWidth = 2;
    context.strokeRect(left, row.y + 1, wide, row.height - 2);
    context.lineWidth = 1;
  }

  function choose(row, box) {
    chosen = { row, box };
    const { rank, lane, boxes: all } = rows[row];
    const [title] = data.names[all[box + 2]];
    const part = step().us ? all[box + 1] / step().us : 0;
    output.textContent =
      `Rank ${rank}${lane === "main" ? "" : `, ${lane}`}: ${title}, ${seconds(all[box + 1] / 1e6)} ` +
      `(${share(part)}), from ${seconds(all[box] / 1e6)}`;
    draw();
  }

  function zoom(factor, around) {
    const middle = around ?? (chosen ? centre() : (from + to) / 2), whole = step().us || 1;
    const length = Math.min(whole, Math.max(whole / 5000, (to - from) * factor));
    move(middle - ((middle - from) / (to - from)) * length, length);
  }

  function move(start, length) {
    const whole = step().us || 1;
    from = Math.min(Math.max(0, start), whole - length);
    to = from + length;
    draw();
  }

  function centre() {
    const { boxes: all } = rows[chosen.row];
    return all[chosen.box] + all[chosen.box + 1] / 2;
  }

  function into() {
    if (!chosen) return;
    const { boxes: all } = rows[chosen.row], length = Math.max(all[chosen.box + 1] * 1.4, (step().us || 1) / 5000);
    move(centre() - length / 2, Math.min(length, step().us || 1));
  }

  function bring() {
    if (centre() < from || centre() > to) move(centre() - (to - from) / 2, to - from);
  }

  // The box of a row that is nearest to a moment.
  function nearest(row, time) {
    const all = rows[row].boxes;
    let best = 0, least = Infinity;
    for (let index = 0; index < all.length; index += 3) {
      const away = Math.max(all[index] - time, time - all[index] - all[index + 1], 0);
      if (away < least) { least = away; best = index; }
    }
    return best;
  }

  function walk(across, down) {
    const filled = (row) => rows[row] && rows[row].boxes.length;
    if (!chosen) {
      const row = rows.findIndex((each) => each.boxes.length);
      if (row >= 0) choose(row, 0);
      return;
    }
    if (across) {
      const box = chosen.box + 3 * across;
      if (box >= 0 && box < rows[chosen.row].boxes.length) choose(chosen.row, box);
    }
    for (let row = chosen.row + down; down && rows[row]; row += down) {
      if (filled(row)) { choose(row, nearest(row, centre())); break; }
    }
    bring();
  }

  function hit(event) {
    const bounds = canvas.getBoundingClientRect(), y = event.clientY - bounds.top;
    const row = rows.findIndex((each) => y >= each.y && y < each.y + each.height);
    if (row < 0 || !rows[row].boxes.length) return;
    const time = timeAt(event.clientX - bounds.left), box = nearest(row, time), all = rows[row].boxes;
    const slack = ((to - from) / span()) * 4;
    if (time >= all[box] - slack && time <= all[box] + all[box + 1] + slack) choose(row, box);
  }

  const pointers = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    hit(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) {
      if (event.pointerType === "mouse") hit(event);
      return;
    }
    const others = [...pointers].filter(([id]) => id !== event.pointerId);
    const before = pointers.get(event.pointerId), left = canvas.getBoundingClientRect().left;
    pointers.set(event.pointerId, event.clientX);
    if (others.length) {
      const other = others[0][1], old = Math.abs(before - other), now = Math.abs(event.clientX - other);
      if (old > 8 && now > 8) zoom(old / now, timeAt((event.clientX + other) / 2 - left));
    } else {
      move(from - ((event.clientX - before) / span()) * (to - from), to - from);
    }
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => pointers.delete(event.pointerId));
  }
  canvas.addEventListener("dblclick", (event) => {
    zoom(0.5, timeAt(event.clientX - canvas.getBoundingClientRect().left));
  });
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !sideways) return;
    event.preventDefault();
    if (sideways) move(from + (event.deltaX / span()) * (to - from), to - from);
    else zoom(Math.exp(event.deltaY / 200), timeAt(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });

  const keys = {
    ArrowLeft: () => walk(-1, 0), ArrowRight: () => walk(1, 0), ArrowUp: () => walk(0, -1), ArrowDown: () => walk(0, 1),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), Enter: into, 0: () => show(at), Escape: () => show(at),
  };
  canvas.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });

  const press = (id, act) => document.getElementById(id).addEventListener("click", act);
  press("before", () => show(Math.max(0, at - 1)));
  press("after", () => show(Math.min(data.steps.length - 1, at + 1)));
  press("in", () => zoom(0.5));
  press("out", () => zoom(2));
  press("all", () => show(at));
  which.addEventListener("change", () => show(Number(which.value)));
  lanes.addEventListener("change", () => { chosen = null; draw(); });
  redrawn(canvas, draw);
  show(at);
  return { show };
}
