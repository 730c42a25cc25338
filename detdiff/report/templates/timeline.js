// The timeline: every forward of both runs, its rows against the thresholds, its kernel path, and who was in it.
const LANES = 6;
const BARS = 64;

class TimelineView {
  constructor(tool, series) {
    this.series = series;
    this.runs = ["a", "b"].filter((run) => series.runs[run].forward.length);
    this.cursor = { run: this.runs[0], place: 0 };
    this.span = new Span(Math.max(1, ...this.runs.map((run) => series.forwards[run])));
    this.requests = series.requests.map((request) => request.id);
    this.most = Math.max(1, ...this.runs.flatMap((run) => [series.runs[run].rows.reduce((x, y) => Math.max(x, y), 1)]));
    this.paths = this.commonPaths();
    // Of the request that flips, or else of the first that parts.
    const { requests } = series;
    const marked = requests.find((request) => request.flip !== null) ?? requests.find((request) => request.birth_forwards);
    this.birth = this.placesOf(marked?.birth_forwards);
    this.flip = this.placesOf(marked?.flip_forwards);
    this.stage = new Stage(tool, {
      kind: "timeline",
      help: "Left and right go through the forwards, up and down change the run; values are read out beside the picture.",
      keys: [
        ["← →", "another forward, with Shift by 10."], ["↑ ↓", "the other run."], ["+ −", "zoom,"], ["0", "shows all,"],
        ["Home End", "go to the ends."], ...(Object.keys(this.birth).length ? [["B", "birth,"]] : []),
        ...(Object.keys(this.flip).length ? [["F", "flip,"]] : []), ["E", "next event."],
      ],
      draw: (...all) => this.draw(...all),
      press: (key, by) => this.press(key, by),
    });
    this.stage.clicked = (x, y) => this.click(x, y);
    this.addControls();
  }

  commonPaths() {
    const counted = new Map();
    for (const run of this.runs) for (const path of this.series.runs[run].path) counted.set(path, (counted.get(path) ?? 0) + 1);
    counted.delete(-1);
    return [...counted].sort((one, other) => other[1] - one[1]).map(([path]) => path);
  }

  placesOf(forwards) {
    const places = {};
    ["a", "b"].forEach((run, n) => {
      const place = forwards ? this.series.placeOf(run, forwards[n]) : -1;
      if (place >= 0) places[run] = place;
    });
    return places;
  }

  addControls() {
    const { stage } = this;
    stage.group("Run", ...this.runs.map((run) => stage.button(`Run ${run}`, () => this.choose(run))));
    stage.group(
      "Forwards",
      stage.button("−", () => this.press("-", 1), "Zoom out"),
      stage.button("+", () => this.press("+", 1), "Zoom in"),
      stage.button("All", () => this.press("0", 1), "Show all forwards"),
    );
    const jumps = [];
    if (Object.keys(this.birth).length) jumps.push(stage.button("Birth", () => this.press("b", 1)));
    if (Object.keys(this.flip).length) jumps.push(stage.button("Flip", () => this.press("f", 1)));
    jumps.push(stage.button("Next event", () => this.press("e", 1)));
    stage.group("Go to", ...jumps);
  }

  async start() {
    if (this.birth[this.cursor.run] !== undefined) this.cursor.place = this.birth[this.cursor.run];
    this.refresh();
  }

  get count() {
    return this.series.forwards[this.cursor.run];
  }

  choose(run) {
    this.cursor.run = run;
    this.cursor.place = Math.min(this.cursor.place, this.count - 1);
    this.refresh();
  }

  press(key, by) {
    const { cursor, span } = this;
    const go = (place) => {
      cursor.place = Math.max(0, Math.min(this.count - 1, place));
      span.follow(cursor.place);
    };
    switch (key) {
      case "ArrowLeft": go(cursor.place - by); break;
      case "ArrowRight": go(cursor.place + by); break;
      case "PageUp": go(cursor.place - span.width); break;
      case "PageDown": go(cursor.place + span.width); break;
      case "Home": go(0); break;
      case "End": go(this.count - 1); break;
      case "ArrowUp": this.choose(this.runs[0]); break;
      case "ArrowDown": this.choose(this.runs.at(-1)); break;
      case "+": case "=": span.zoom(0.5, cursor.place); break;
      case "-": case "_": span.zoom(2, cursor.place); break;
      case "0": span.reset(span.count); break;
      case "b": go(this.birth[cursor.run] ?? cursor.place); break;
      case "f": go(this.flip[cursor.run] ?? cursor.place); break;
      case "e": go(this.nextEvent()); break;
      default: return false;
    }
    this.refresh();
    return true;
  }

  nextEvent() {
    const { run, place } = this.cursor;
    const has = (n) => this.series.names[n].length > 0;
    const { events } = this.series.runs[run];
    const next = events.findIndex((n, at) => at > place && has(n));
    const first = events.findIndex(has);
    return next >= 0 ? next : first >= 0 ? first : place;
  }

  click(x, y) {
    if (!this.plan) return;
    const place = this.span.low + Math.floor((x - this.plan.left) / this.plan.cell);
    const run = this.runs[Math.min(this.runs.length - 1, Math.floor(y / this.plan.block))];
    if (place < this.span.low || place >= Math.min(this.span.high, this.series.forwards[run])) return;
    Object.assign(this.cursor, { run, place });
    this.refresh();
  }

  refresh() {
    this.stage.draw();
    const { run, place } = this.cursor;
    const forward = this.series.forward(run, place);
    const who = forward.members.map((m) => `${m.rows} ${m.phase} of ${m.request}, from position ${m.start}`);
    const marks = [this.birth[run] === place ? "the birth" : "", this.flip[run] === place ? "the flip" : ""].filter(Boolean);
    const pairs = [
      ["rows M", forward.rows.toLocaleString("en")],
      ["who", who.slice(0, 12).join("\n") + (who.length > 12 ? `\n${who.length - 12} more` : "")],
      ["linear calls", short(forward.path)],
      ["all paths", forward.paths.map(([path, sites]) => `${short(path)} at ${sites} ${sites === 1 ? "site" : "sites"}`).join("\n") || "not recorded"],
      ["writes", `cache entries of ${forward.writes.toLocaleString("en")} ${forward.writes === 1 ? "position" : "positions"}`],
    ];
    if (forward.model !== "target") pairs.unshift(["model", forward.model]);
    if (marks.length) pairs.unshift(["here", marks.join(" and ")]);
    if (forward.events.length) pairs.push(["events", forward.events.join("\n")]);
    this.stage.show(`Run ${run}, forward ${forward.forward} of ${this.count}`, pairs);
  }

  draw(context, width, resize) {
    const lanes = Math.min(LANES, this.requests.length);
    const left = Math.min(110, width * 0.24), right = width - 6;
    const cell = Math.min(28, (right - left) / this.span.width);
    const block = 26 + BARS + 18 + 16 + lanes * 13 + 22;
    this.plan = { left, cell, block, right: left + cell * this.span.width, lanes };
    resize(block * this.runs.length + 26);
    const colours = palette();
    this.runs.forEach((run, n) => this.drawRun(context, run, n * block, colours));
    const bottom = block * this.runs.length;
    ticks(context, this.span, left, this.plan.right, bottom, colours);
    const legend = colours.bg;
    if (this.legend !== legend) this.drawLegend(colours);
    this.legend = legend;
  }

  x(place) {
    return this.plan.left + (place - this.span.low) * this.plan.cell;
  }

  drawRun(context, run, top, colours) {
    const { left, right, cell, lanes, block } = this.plan;
    const columns = this.series.runs[run];
    const low = this.span.low, high = Math.min(this.span.high, columns.forward.length);
    const base = top + 26 + BARS;
    const wide = Math.max(1.5, cell > 4 ? cell - 1 : cell);
    const height = (rows) => (BARS * Math.log2(rows + 1)) / Math.log2(this.most + 1);
    this.label(context, `run ${run}`, top + 12, colours, true);
    this.label(context, "rows M", base - BARS / 2, colours);
    this.label(context, this.most.toLocaleString("en"), base - BARS + 5, colours);
    this.label(context, "writes", base + 8, colours);
    this.label(context, "path", base + 26, colours);
    // A forward that is narrower than a mark's line is drawn over it.
    const marks = () => this.drawMarks(context, run, top + 20, base + 36 + lanes * 13, colours);
    if (cell < 3) marks();
    context.fillStyle = colours.axis;
    for (let n = low; n < high; n++) {
      const bar = height(columns.rows[n]);
      context.fillRect(this.x(n), base - bar, wide, bar);
    }
    for (let n = low; n < high; n++) {
      if (columns.writes[n]) context.fillRect(this.x(n), base + 4, wide, 1 + 8 * (Math.log2(columns.writes[n] + 1) / Math.log2(this.most + 1)));
    }
    context.fillStyle = colours.axis;
    context.fillRect(left, base, right - left, 1);
    this.drawPaths(context, columns.path, low, high, base + 20, wide, colours);
    this.drawLanes(context, columns.members, low, high, base + 38, wide, colours, lanes);
    this.drawEvents(context, columns.events, low, high, base + 38 + lanes * 13 + 3, colours);
    this.drawThresholds(context, run, base, height, colours);
    if (cell >= 3) marks();
    if (run === this.cursor.run) ring(context, this.x(this.cursor.place), top + 30, cell, block - 40, colours);
  }

  label(context, words, y, colours, strong = false) {
    context.textAlign = "right";
    context.fillStyle = strong ? colours.ink : colours.soft;
    if (strong) context.font = "bold 12px system-ui, sans-serif";
    context.fillText(fitted(context, words, this.plan.left - 12), this.plan.left - 8, y);
    context.font = "12px system-ui, sans-serif";
  }

  // The most common path is a thin line, the next a solid band, then hatched, then dots: told apart without colour.
  paintPath(context, place, x, y, width, colours) {
    context.fillStyle = place === 2 ? hatch(context, colours.ink) : colours.ink;
    if (place === 0) context.fillRect(x, y + 5, width, 2);
    else if (place < 3) context.fillRect(x, y, width, 12);
    else context.fillRect(x + width / 2 - 1, y + 4, Math.min(width, 3), 4);
  }

  drawPaths(context, paths, low, high, y, wide, colours) {
    for (let n = low; n < high; n++) {
      const place = this.paths.indexOf(paths[n]);
      if (place >= 0) this.paintPath(context, place, this.x(n), y, wide, colours);
    }
  }

  // Prefill is solid, decode a thin line, verify hatched, draft a dot.
  paintPhase(context, phase, x, y, width, colour) {
    context.fillStyle = phase === "verify" ? hatch(context, colour) : colour;
    if (phase === "prefill" || phase === "verify") context.fillRect(x, y, width, 10);
    else if (phase === "decode") context.fillRect(x, y + 3.5, width, 3);
    else context.fillRect(x + width / 2 - 1, y + 4, Math.min(width, 3), 3);
  }

  colourOf(lane, colours) {
    return colours[lane < 5 ? `r${lane}` : "rx"];
  }

  drawLanes(context, members, low, high, y, wide, colours, lanes) {
    const more = this.requests.length > lanes;
    for (let lane = 0; lane < lanes; lane++) {
      const words = more && lane === lanes - 1 ? `${this.requests.length - lanes + 1} others` : this.requests[lane];
      this.label(context, words, y + lane * 13 + 5, colours);
    }
    const lane = new Map(this.series.names.map((name, n) => [n, this.requests.indexOf(name)]));
    for (let n = low; n < high; n++) {
      for (const [request, phase] of members[n]) {
        const at = lane.get(request);
        // A request that only one run has is drawn nowhere, and named beside the picture.
        if (at < 0) continue;
        const place = Math.min(at, lanes - 1);
        this.paintPhase(context, this.series.names[phase], this.x(n), y + place * 13, wide, this.colourOf(at, colours));
      }
    }
  }

  drawEvents(context, events, low, high, y, colours) {
    this.label(context, "events", y + 6, colours);
    for (let n = low; n < high; n++) {
      const said = this.series.names[events[n]];
      if (said.length) this.paintEvent(context, said.some((words) => words.startsWith("trim")), this.x(n) + this.plan.cell / 2, y + 6, colours);
    }
  }

  paintEvent(context, trim, x, y, colours) {
    if (trim) {
      triangle(context, x, y + 5, 5);
      context.fillStyle = colours.ink;
      context.fill();
    } else {
      context.strokeStyle = colours.ink;
      context.lineWidth = 1.5;
      context.beginPath();
      for (const side of [-1, 1]) {
        context.moveTo(x - 3.5, y - 3.5 * side);
        context.lineTo(x + 3.5, y + 3.5 * side);
      }
      context.stroke();
    }
  }

  drawThresholds(context, run, base, height, colours) {
    for (const { run: of, after, before } of this.series.thresholds) {
      if (of !== run) continue;
      const y = base - height(Math.sqrt(after * before));
      context.strokeStyle = colours.ink;
      context.lineWidth = 1.2;
      context.setLineDash([7, 3, 2, 3]);
      context.beginPath();
      context.moveTo(this.plan.left, y);
      context.lineTo(this.plan.right, y);
      context.stroke();
      context.setLineDash([]);
      context.textAlign = "right";
      context.fillStyle = colours.ink;
      context.strokeStyle = colours.bg;
      context.lineWidth = 4;
      const words = `${after} | ${before} rows`;
      context.strokeText(words, this.plan.right - 4, y - 9);
      context.fillText(words, this.plan.right - 4, y - 9);
    }
  }

  drawMarks(context, run, top, bottom, colours) {
    for (const [places, name] of [[this.birth, "birth"], [this.flip, "flip"]]) {
      const place = places[run];
      if (place === undefined || place < this.span.low || place >= this.span.high) continue;
      const x = this.x(place) + this.plan.cell / 2;
      const colour = name === "birth" ? colours.origin : colours.ink;
      vertical(context, x, top, bottom, colour, name === "birth" ? [] : [5, 3]);
      if (name === "birth") diamond(context, x, top, 5);
      else triangle(context, x, top + 2, 5);
      outlined(context, colour, colours.bg);
      context.fillStyle = colour;
      const left = x > this.plan.right - 50;
      context.textAlign = left ? "right" : "left";
      context.fillText(name, x + (left ? -8 : 8), top - 4);
    }
  }

  drawLegend(colours) {
    const { stage, series } = this;
    const entries = this.paths.slice(0, 4).map((path, n) =>
      stage.entry(`linear calls on ${short(series.names[path])}`, (context) => this.paintPath(context, n, 0, 1, 16, colours)));
    const phases = new Set(this.runs.flatMap((run) => series.runs[run].members.flat().map(([, phase]) => phase)));
    for (const phase of [...phases].map((n) => series.names[n]).sort()) {
      entries.push(stage.entry(phase, (context) => this.paintPhase(context, phase, 0, 2, 16, colours.r0)));
    }
    entries.push(stage.entry("trim", (context) => this.paintEvent(context, true, 8, 6, colours)));
    entries.push(stage.entry("another event", (context) => this.paintEvent(context, false, 8, 7, colours)));
    if (series.thresholds.length) {
      entries.push(stage.entry("rows at which linear calls change their path", (context) => {
        context.strokeStyle = colours.ink;
        context.setLineDash([5, 2, 1, 2]);
        context.beginPath();
        context.moveTo(0, 7);
        context.lineTo(16, 7);
        context.stroke();
      }));
    }
    stage.legend.replaceChildren(...entries);
  }
}
