// The series: arrays are unpacked when they are first looked at.
async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const STATE = { none: 0, equal: 1, propagated: 2, origin: 3 };

class Grid {
  static async of(packed, names) {
    const grid = new Grid();
    const { name, columns, step } = packed;
    const rows = names[packed.rows];
    Object.assign(grid, { name, rows, positions: columns, step, columns: Math.ceil(columns / step) });
    for (const array of ["state", "share", "ulp", "rel"]) {
      if (!packed[array]) continue;
      const bytes = await unpack(packed[array]);
      grid[array] = bytes.length === rows.length * grid.columns ? bytes : new Float32Array(bytes.buffer);
    }
    grid.state ??= new Uint8Array(rows.length * grid.columns);
    return grid;
  }

  at(row, position) {
    return row * this.columns + Math.floor(position / this.step);
  }

  // By position, then by row: the order in which they were run.
  get origins() {
    if (!this.found) {
      this.found = [];
      this.state.forEach((state, n) => {
        if (state === STATE.origin) this.found.push([Math.floor(n / this.columns), (n % this.columns) * this.step]);
      });
      this.found.sort((one, other) => one[1] - other[1] || one[0] - other[0]);
    }
    return this.found;
  }
}

class Series {
  static async of(text) {
    const series = new Series();
    const packed = JSON.parse(text);
    series.packed = packed.requests;
    series.rows = packed.rows;
    Object.assign(series, JSON.parse(new TextDecoder().decode(await unpack(packed.lists))));
    series.grids = new Map();
    series.written = new Map();
    return series;
  }

  grid(request, part, number = 0) {
    const key = `${request} ${part} ${number}`;
    if (!this.grids.has(key)) this.grids.set(key, Grid.of(this.packed[request][part][number], this.rows));
    return this.grids.get(key);
  }

  get forwards() {
    return { a: this.runs.a.forward.length, b: this.runs.b.forward.length };
  }

  // The last forward that ran a request's row, as its place in the run; undefined where none is known.
  forwardOf(run, id, position, model) {
    const key = `${run} ${model} ${id}`;
    if (!this.written.has(key)) {
      const found = [];
      const { members, model: models } = this.runs[run];
      members.forEach((all, n) => {
        if (this.names[models[n]] !== model) return;
        for (const [request, , start, rows] of all) {
          if (this.names[request] === id) for (let p = start; p < start + rows; p++) found[p] = n;
        }
      });
      this.written.set(key, found);
    }
    return this.written.get(key)[position];
  }

  placeOf(run, forward) {
    return forward === null || forward === undefined ? -1 : this.runs[run].forward.indexOf(forward);
  }

  // A forward as its reader is told of it.
  forward(run, place) {
    const columns = this.runs[run];
    const members = columns.members[place].map(([request, phase, start, rows]) => ({
      request: this.names[request], phase: this.names[phase], start, rows,
    }));
    return {
      forward: columns.forward[place],
      model: this.names[columns.model[place]],
      rows: columns.rows[place],
      members,
      paths: this.names[columns.paths[place]],
      path: columns.path[place] < 0 ? null : this.names[columns.path[place]],
      writes: columns.writes[place],
      events: this.names[columns.events[place]],
    };
  }
}

const short = (path) => (path === null ? "not recorded" : path.replace(/^(reference|forced)\//, ""));
const rowsOf = (n) => `${n.toLocaleString("en")} ${n === 1 ? "row" : "rows"}`;
const whoOf = (forward, most = 8) => {
  const said = forward.members.slice(0, most).map((m) => `${m.rows} ${m.phase} of ${m.request}`);
  if (forward.members.length > most) said.push(`${forward.members.length - most} more`);
  return said.join(" + ");
};
