// How the map is painted: states, sizes in steps of the scale, and what is drawn above them.
const SIZES = {
  share: { said: "share of digests", legend: "differs: few to all of the digests" },
  ulp: { said: "max ULP", legend: "differs: from 1, 2, 4, 16, 64, 256, 4,096 and 65,536 ULP", limits: [2, 4, 16, 64, 256, 4096, 65536] },
  rel: { said: "max relative", legend: "differs: below 1e-7 relative, then by tens to above 0.1", limits: [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1] },
};
const UNSIZED = 8;

class MapPainting {
  step(n) {
    const { grid, by } = this;
    if (grid.state[n] < STATE.propagated) return -1;
    if (by === "share") return grid.share[n] ? Math.floor(((grid.share[n] - 1) * 8) / 255) : UNSIZED;
    if (!by || Number.isNaN(grid[by][n])) return UNSIZED;
    const { limits } = SIZES[by];
    let step = 0;
    while (step < limits.length && grid[by][n] >= limits[step]) step++;
    return step;
  }

  draw(context, width, resize) {
    const { grid, span } = this;
    if (!grid || !grid.positions) return;
    const labels = grid.rows.map((row) => row.replace(/^.*?layers\.\d+\./, "").replace(/ the layers$/, ""));
    const longest = Math.max(0, ...labels.map((label) => context.measureText(label).width));
    const left = Math.min(longest + 12, Math.max(70, width * 0.3));
    const row = Math.max(4, Math.min(22, Math.floor(540 / grid.rows.length)));
    const cell = Math.min(28, (width - left - 4) / span.width);
    this.plan = { left, top: 38, cell, row };
    // For programs that look at the page.
    Object.assign(this.stage.canvas.dataset, this.plan);
    resize(38 + row * grid.rows.length + 26);
    const colours = palette();
    const plan = { ...this.plan, right: left + cell * span.width, bottom: 38 + row * grid.rows.length };
    this.drawHead(context, plan, colours);
    this.drawCells(context, plan, colours);
    this.drawLabels(context, plan, labels, colours);
    ticks(context, span, left, plan.right, plan.bottom, colours);
    const { row: cursorRow, position } = this.cursor;
    ring(context, left + (position - span.low) * cell, plan.top + cursorRow * row, cell, row, colours, 17);
  }

  drawHead(context, { left, right, cell, top, bottom }, colours) {
    const { span, request } = this;
    const split = Math.max(left, Math.min(right, left + (request.prompt - span.low) * cell));
    context.fillStyle = colours.axis;
    context.fillRect(left, top - 8, split - left, 4);
    context.strokeStyle = colours.axis;
    context.lineWidth = 1;
    if (split < right) context.strokeRect(split + 0.5, top - 7.5, right - split - 1, 3);
    context.fillStyle = colours.soft;
    context.textAlign = "left";
    if (split - left > 45) context.fillText("prompt", left, top - 15);
    if (right - split > 60) context.fillText("generated", split, top - 15);
    const flip = request.flip_position;
    if (flip === null || flip < span.low || flip >= span.high) return;
    const x = left + (flip - span.low + 0.5) * cell;
    vertical(context, x, top - 10, bottom, colours.ink, [5, 3]);
    triangle(context, x, top - 10, 5);
    outlined(context, colours.ink, colours.bg);
    context.textAlign = x > (left + right) / 2 ? "right" : "left";
    context.fillText("flip", x + (x > (left + right) / 2 ? -9 : 9), top - 29);
  }

  drawCells(context, { left, top, cell, row, right }, colours) {
    const { grid, span } = this;
    const columns = Math.max(1, Math.min(span.width, Math.floor(cell * span.width)));
    const wide = (right - left) / columns;
    const fills = [...Array(8).keys()].map((n) => colours[`s${n}`]);
    const stripes = hatch(context, colours.none), { equal, unsized, origin, bg } = colours;
    const born = [];
    for (let r = 0; r < grid.rows.length; r++) {
      const y = top + r * row;
      let from = 0, last = null;
      const paint = (to) => {
        if (last === null || to === from) return;
        const x = left + from * wide, w = (to - from) * wide;
        if (last === -2) context.fillStyle = stripes;
        else if (last === -1) context.fillStyle = equal;
        else if (last === UNSIZED) context.fillStyle = unsized;
        else context.fillStyle = fills[last];
        if (last === UNSIZED) context.fillRect(x, y + row * 0.3, w, row * 0.4);
        else context.fillRect(x, y, w, row);
      };
      for (let c = 0; c < columns; c++) {
        // A column shows the strongest of its positions.
        let strongest = 0, size = -1;
        const start = span.low + Math.floor((c * span.width) / columns);
        const end = Math.max(start + 1, span.low + Math.floor(((c + 1) * span.width) / columns));
        for (let p = start - (start % grid.step); p < end; p += grid.step) {
          const n = grid.at(r, p);
          if (grid.state[n] > strongest) strongest = grid.state[n];
          const step = this.step(n);
          if (step === UNSIZED ? size < 0 : step >= 0) size = size === UNSIZED ? step : Math.max(size, step);
        }
        if (strongest === STATE.origin) born.push([left + (c + 0.5) * wide, y + row / 2]);
        const kind = strongest === STATE.none ? -2 : size;
        if (kind !== last) {
          paint(c);
          from = c;
          last = kind;
        }
      }
      paint(columns);
    }
    context.fillStyle = bg;
    if (row >= 6) for (let r = 1; r < grid.rows.length; r++) context.fillRect(left, top + r * row - 0.5, right - left, 1);
    if (cell * grid.step >= 6) for (let c = 1; c < span.width; c += grid.step) context.fillRect(left + c * cell - 0.5, top, 1, row * grid.rows.length);
    const r = Math.min(7, Math.max(3.5, 0.42 * Math.min(wide, row)));
    for (const [x, y] of born) {
      diamond(context, x, y, r);
      outlined(context, origin, bg);
    }
    // A legend is drawn anew only where its colours are others.
    const legend = `${this.by} ${bg}`;
    if (this.legend !== legend) this.drawLegend(colours);
    this.legend = legend;
  }

  drawLabels(context, { left, top, row }, labels, colours) {
    const every = Math.ceil(13 / row);
    context.textAlign = "right";
    labels.forEach((label, r) => {
      if (r % every && r !== this.cursor.row) return;
      if (r !== this.cursor.row && Math.abs(r - this.cursor.row) < every) return;
      context.fillStyle = r === this.cursor.row ? colours.ink : colours.soft;
      context.fillText(fitted(context, label, left - 10), left - 6, top + (r + 0.5) * row);
    });
  }

  drawLegend(colours) {
    const { stage, by } = this;
    const square = (colour) => (context) => {
      context.fillStyle = colour;
      context.fillRect(2, 1, 12, 12);
    };
    const entries = [
      stage.entry("origin: born here", (context) => {
        diamond(context, 8, 7, 6);
        context.fillStyle = colours.origin;
        context.fill();
      }),
      stage.entry("bit-equal", square(colours.equal)),
      stage.entry("not compared", (context) => {
        context.fillStyle = hatch(context, colours.none);
        context.fillRect(2, 1, 12, 12);
      }),
    ];
    if (by) {
      const scale = stage.entry(SIZES[by].legend, square(colours.s0));
      for (let n = 7; n; n--) scale.firstChild.after(stage.entry("", square(colours[`s${n}`])).firstChild);
      entries.splice(1, 0, scale);
    }
    entries.push(stage.entry("differs, size not recorded", (context) => {
      context.fillStyle = colours.unsized;
      context.fillRect(2, 4, 12, 6);
    }));
    stage.legend.replaceChildren(...entries);
  }
}
