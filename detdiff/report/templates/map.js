// The map: rows of a grid over positions, from all layers into the sites or the cache entries of one.
const STATES = ["not compared", "bit-equal", "propagated: its inputs differed already", "origin: born here"];

class MapView extends MapPainting {
  constructor(tool, series) {
    super();
    this.series = series;
    this.number = Number(tool.dataset.request);
    this.request = series.requests[this.number];
    this.shapes = series.packed[this.number];
    this.part = "layers";
    this.of = 0;
    this.by = null;
    this.cursor = { row: 0, position: 0 };
    this.stage = new Stage(tool, {
      kind: "map",
      help: "Arrow keys move the cursor; values are read out beside the map.",
      keys: [
        ["←→↑↓", "move, with Shift by 10."], ["Enter", "opens the sites of the row's layer,"], ["C", "its cache entries,"],
        ["Esc", "goes back."], ["+ −", "zoom into positions,"], ["0", "shows all,"], ["Home End", "go to the ends."],
        ...(this.request.birth === null ? [] : [["B", "birth,"]]), ...(this.request.flip_position === null ? [] : [["F", "flip,"]]),
        ["N P", "next and previous origin."],
      ],
      draw: (...all) => this.draw(...all),
      press: (key, by) => this.press(key, by),
    });
    this.stage.clicked = (x, y) => this.click(x, y);
    this.addControls();
  }

  addControls() {
    const { stage } = this;
    this.what = stage.select("Show", (value) => this.open(...value.split(":")));
    this.what.append(make("option", { value: "layers:0" }, "all layers"));
    for (const [part, label] of [["sites", "Sites of"], ["entries", "Cache entries of"]]) {
      if (!this.shapes[part].length) continue;
      const group = make("optgroup", { label });
      this.shapes[part].forEach(({ name }, n) => {
        group.append(make("option", { value: `${part}:${n}` }, `${part === "sites" ? "sites" : "cache entries"} of ${name}`));
      });
      this.what.append(group);
    }
    this.colour = stage.select("Colour by", (value) => {
      this.by = value;
      this.refresh();
    });
    this.deeper = stage.button("Open sites", () => this.press("Enter", 1));
    this.entries = stage.button("Open cache entries", () => this.press("c", 1));
    this.back = stage.button("Back to layers", () => this.press("Escape", 1));
    stage.group("Level", this.deeper, this.entries, this.back);
    stage.group(
      "Positions",
      stage.button("−", () => this.press("-", 1), "Zoom out"),
      stage.button("+", () => this.press("+", 1), "Zoom in"),
      stage.button("All", () => this.press("0", 1), "Show all positions"),
    );
    const jumps = [];
    if (this.request.birth !== null) jumps.push(stage.button("Birth", () => this.press("b", 1)));
    if (this.request.flip_position !== null) jumps.push(stage.button("Flip", () => this.press("f", 1)));
    jumps.push(stage.button("Next origin", () => this.press("n", 1)));
    stage.group("Go to", ...jumps);
  }

  async start() {
    await this.open("layers", 0);
    this.toBirth();
    this.refresh();
  }

  async open(part, number) {
    const asked = (this.asked = Symbol(part));
    this.stage.area.setAttribute("aria-busy", "true");
    const grid = await this.series.grid(this.number, part, Number(number));
    // Something else was asked for meanwhile.
    if (asked !== this.asked) return false;
    this.stage.area.removeAttribute("aria-busy");
    if (this.grid?.positions !== grid.positions) this.span = new Span(grid.positions);
    Object.assign(this, { part, of: Number(number), grid });
    this.cursor.row = Math.min(this.cursor.row, this.grid.rows.length - 1);
    this.cursor.position = Math.max(0, Math.min(this.cursor.position, this.grid.positions - 1));
    this.what.value = `${part}:${this.of}`;
    const known = ["ulp", "rel", "share"].filter((size) => this.grid[size]);
    this.colour.replaceChildren(...known.map((size) => make("option", { value: size }, SIZES[size].said)));
    if (!known.includes(this.by)) this.by = this.mostKnown(known);
    this.colour.value = this.by ?? "";
    this.colour.parentElement.hidden = known.length < 2;
    // Into a layer one goes to look for where something was born.
    if (part !== "layers") this.toOriginHere();
    this.refresh();
    return true;
  }

  mostKnown(known) {
    const { state, ulp } = this.grid;
    if (!known.includes("ulp")) return known.at(-1) ?? null;
    let differing = 0, sized = 0;
    state.forEach((value, n) => {
      if (value >= STATE.propagated) {
        differing++;
        sized += !Number.isNaN(ulp[n]);
      }
    });
    return sized * 2 >= differing ? "ulp" : "share";
  }

  // The layer that the cursor is on or that is open, as the number of its grid; -1 where it has none.
  numberIn(part) {
    const name = this.part === "layers" ? this.grid.rows[this.cursor.row] : this.grid.name;
    return this.shapes[part].findIndex((each) => each.name === name);
  }

  toBirth() {
    const { birth } = this.request;
    if (birth === null) return;
    this.cursor.position = birth;
    this.toOriginHere();
    this.span.follow(this.cursor.position);
  }

  toOriginHere() {
    const { position } = this.cursor;
    const here = this.grid.origins.find(([, at]) => at === position - (position % this.grid.step));
    if (here) this.cursor.row = here[0];
  }

  press(key, by) {
    const { cursor, grid, span } = this;
    if (!grid) return false;
    const go = (position) => {
      cursor.position = Math.max(0, Math.min(grid.positions - 1, position));
      span.follow(cursor.position);
    };
    const step = by * grid.step;
    switch (key) {
      case "ArrowLeft": go(cursor.position - step); break;
      case "ArrowRight": go(cursor.position + step); break;
      case "PageUp": go(cursor.position - span.width); break;
      case "PageDown": go(cursor.position + span.width); break;
      case "Home": go(0); break;
      case "End": go(grid.positions - 1); break;
      case "ArrowUp": cursor.row = Math.max(0, cursor.row - by); break;
      case "ArrowDown": cursor.row = Math.min(grid.rows.length - 1, cursor.row + by); break;
      case "+": case "=": span.zoom(0.5, cursor.position); break;
      case "-": case "_": span.zoom(2, cursor.position); break;
      case "0": span.reset(grid.positions); break;
      case "b": this.toBirth(); break;
      case "f": if (this.request.flip_position !== null) go(this.request.flip_position); break;
      case "n": case "p": this.toOrigin(key === "n" ? 1 : -1); break;
      case "Enter": return this.into("sites");
      case "c": return this.into("entries");
      case "Escape": case "Backspace": return this.up();
      default: return false;
    }
    this.refresh();
    return true;
  }

  into(part) {
    const number = this.numberIn(part);
    if (number < 0 || (part === this.part)) return false;
    this.open(part, number);
    return true;
  }

  up() {
    if (this.part === "layers") return false;
    const { name } = this.grid;
    this.open("layers", 0).then((opened) => {
      if (!opened) return;
      this.cursor.row = Math.max(0, this.grid.rows.indexOf(name));
      this.refresh();
    });
    return true;
  }

  toOrigin(direction) {
    const { cursor, grid } = this;
    const all = direction > 0 ? grid.origins : [...grid.origins].reverse();
    const at = cursor.position - (cursor.position % grid.step);
    const past = ([row, position]) => direction * (position - at || row - cursor.row) > 0;
    const found = all.find(past) ?? all[0];
    if (!found) return;
    [cursor.row, cursor.position] = found;
    this.span.follow(cursor.position);
  }

  click(x, y) {
    const { plan, grid, span, cursor } = this;
    if (!plan) return;
    const column = Math.floor((x - plan.left) / plan.cell), row = Math.floor((y - plan.top) / plan.row);
    if (column < 0 || column >= span.width || row < 0 || row >= grid.rows.length) return;
    Object.assign(cursor, { row, position: span.low + column });
    this.refresh();
  }

  refresh() {
    this.stage.draw();
    this.tell();
    const inside = this.part !== "layers";
    this.back.disabled = !inside;
    this.deeper.disabled = this.part === "sites" || this.numberIn("sites") < 0;
    this.entries.disabled = this.part === "entries" || this.numberIn("entries") < 0;
  }

  // What the cursor is on.
  tell() {
    const { grid, cursor, request } = this;
    if (!grid.rows.length || !grid.positions) return this.stage.show("Nothing was compared", []);
    const n = grid.at(cursor.row, cursor.position);
    const first = cursor.position - (cursor.position % grid.step);
    const place = grid.step > 1 ? `positions ${first} to ${Math.min(grid.positions, first + grid.step) - 1}` : `position ${cursor.position}`;
    const pairs = [["state", STATES[grid.state[n]]], ["token", this.tokenAt(cursor.position)]];
    if (this.part !== "layers") pairs.unshift(["in", grid.name]);
    if (grid.state[n] >= STATE.propagated) {
      if (grid.share) pairs.push(["differ", `${Math.round((grid.share[n] / 255) * 100)} % of the digests`]);
      for (const size of ["ulp", "rel"]) {
        if (grid[size] && !Number.isNaN(grid[size][n])) pairs.push([SIZES[size].said, this.sized(size, grid[size][n])]);
      }
    }
    const draft = (this.part === "layers" ? grid.rows[cursor.row] : grid.name).startsWith("draft: ");
    for (const run of ["a", "b"]) {
      const found = this.series.forwardOf(run, request.id, cursor.position, draft ? "draft" : "target");
      if (found === undefined) continue;
      const forward = this.series.forward(run, found);
      const path = forward.path === null ? "" : `; linear calls on ${short(forward.path)}`;
      pairs.push([`in ${run}`, `forward ${forward.forward}, ${rowsOf(forward.rows)} (${whoOf(forward, 3)})${path}`]);
    }
    pairs.push(["in view", `positions ${this.span.low} to ${this.span.high - 1}`]);
    return this.stage.show(`${grid.rows[cursor.row]}, ${place}`, pairs);
  }

  sized(size, value) {
    if (!Number.isFinite(value)) return "infinite";
    return size === "ulp" ? value.toLocaleString("en") : Number(value.toPrecision(3)).toString();
  }

  tokenAt(position) {
    const { request } = this;
    const n = position - request.prompt + 1;
    const { index, position: places, text, other } = request.tokens;
    const found = places[n] === position ? n : places.indexOf(position);
    if (found < 0) return `of the prompt, ${position + 1} of ${request.prompt}`;
    const b = other[index[found]];
    return `chooses generated token ${index[found]} "${text[found]}"${b === undefined ? "" : ` in a, "${b}" in b`}`;
  }
}
