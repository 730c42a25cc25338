// A picture that is used with the keyboard: a cursor over the drawing that is there, and beside it what the cursor is on.
async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const MOVES = [["←→↑↓", "move, with Shift by 10."], ["Home End", "go to the ends."], ["+ −", "zoom,"], ["0", "fits the page."]];
const SVG = "http://www.w3.org/2000/svg";

class Figure {
  constructor(node, { drawings, axes }) {
    Object.assign(this, { node, axes, names: drawings.map(({ name }) => name), packed: drawings, zoom: 1 });
    this.title = node.querySelector("h3").textContent;
    this.area = node.querySelector(".picture");
    this.controls = make("div", { class: "controls", role: "group", "aria-label": `Controls: ${this.title}` });
    this.values = make("div", { class: "values", role: "status", "aria-live": "polite", "aria-atomic": "true" });
    this.help = make("p", { class: "help", id: `${node.id}-help` });
    node.querySelector(".work").before(this.controls);
    node.querySelector(".work").append(this.values);
    node.querySelector(".work").after(this.help);
    for (const [name, value] of Object.entries({
      role: "application", "aria-label": `${this.title}. Arrow keys move the cursor; values are read out beside the picture.`,
      "aria-describedby": this.help.id,
    })) this.area.setAttribute(name, value);
    this.area.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (this.press(event.key.length === 1 ? event.key.toLowerCase() : event.key, event.shiftKey ? 10 : 1)) event.preventDefault();
    });
    this.area.addEventListener("pointerdown", (event) => this.click(event));
    node.classList.add("live");
  }

  async start() {
    await this.open(0, this.area.querySelector("svg"));
    this.addControls();
    this.move(...this.drawing.start);
  }

  addControls() {
    const group = (label, ...buttons) => this.controls.append(make("span", { class: "group", role: "group", "aria-label": label }, ...buttons));
    if (this.packed.length > 1) {
      this.what = make("select");
      this.what.append(...this.names.map((name, n) => make("option", { value: n }, name)));
      this.what.addEventListener("change", () => this.go(Number(this.what.value)));
      this.controls.append(make("label", {}, "Show", this.what));
    }
    this.groups = [make("span", { class: "group", role: "group", "aria-label": "Level" }), make("span", { class: "group", role: "group", "aria-label": "Go to" })];
    this.controls.append(...this.groups);
    group("Size", this.button("−", "-", "Zoom out"), this.button("+", "+", "Zoom in"), this.button("Fit", "0", "Fit the page"));
    this.dress();
  }

  button(words, key, label = words) {
    const button = make("button", { type: "button", "aria-label": label }, words);
    button.addEventListener("click", () => this.press(key, 1));
    return button;
  }

  // What may be done in this drawing.
  dress() {
    const { doors, jumps } = this.drawing;
    if (this.what) this.what.value = this.number;
    this.groups[0].replaceChildren(...doors.map(({ key, label }) => this.button(label, key)));
    this.groups[1].replaceChildren(...jumps.map(({ key, label }) => this.button(label, key)));
    this.groups.forEach((group) => { group.hidden = !group.children.length; });
    const keys = [...MOVES, ...[...doors, ...jumps].map(({ key, label }) => [key === "Escape" ? "Esc" : key.length === 1 ? key.toUpperCase() : key, `${label.toLowerCase()},`])];
    this.help.replaceChildren(...keys.flatMap(([key, what]) => [make("kbd", {}, key), ` ${what} `]));
  }

  // The drawing of that number; the one that is in the page is its own SVG.
  async open(number, there) {
    const asked = (this.asked = Symbol(String(number)));
    this.area.setAttribute("aria-busy", "true");
    const drawing = await unpack(this.packed[number].packed);
    const axis = await unpack(this.axes[drawing.axis]);
    // Another one was asked for meanwhile.
    if (asked !== this.asked) return false;
    this.area.removeAttribute("aria-busy");
    this.first ??= there;
    let svg = this.first;
    if (drawing.svg) svg = document.importNode(new DOMParser().parseFromString(drawing.svg, "image/svg+xml").documentElement, true);
    this.area.querySelector("svg").replaceWith(svg);
    Object.assign(this, { number, drawing, axis, svg, columns: axis.titles.length });
    const lengths = svg.dataset.rows.split(" ").map(Number);
    this.rows = drawing.rows.map((_, n) => ({ top: lengths[2 * n], height: lengths[2 * n + 1] }));
    this.left = Number(svg.dataset.left);
    this.step = Number(svg.dataset.step);
    this.marks = svg.querySelector(".dd-cursor") ?? svg.appendChild(document.createElementNS(SVG, "g"));
    this.marks.setAttribute("class", "dd-cursor");
    this.marks.replaceChildren(...["dd-under-cursor", "dd-over-cursor"].map((name) => {
      const ring = document.createElementNS(SVG, "rect");
      ring.setAttribute("class", name);
      return ring;
    }));
    this.fit();
    return true;
  }

  // Another drawing at the same position; into one of a single layer one goes to look for where something arose.
  async go(number, row = null) {
    const { axis, cursor } = this;
    const at = axis.first + cursor.column * axis.width;
    if (number < 0 || !(await this.open(number))) return;
    this.dress();
    const column = Math.floor((at - this.axis.first) / this.axis.width);
    const arising = this.drawing.jumps.find(({ key }) => key === "n")?.stops.find((stop) => stop[1] === column);
    this.move(row ?? arising?.[0] ?? cursor.row, column);
  }

  press(key, by) {
    if (!this.drawing) return false;
    const { row, column } = this.cursor;
    const page = Math.max(1, Math.floor(this.columns / 8));
    const to = {
      ArrowLeft: [row, column - by], ArrowRight: [row, column + by], ArrowUp: [row - by, column], ArrowDown: [row + by, column],
      PageUp: [row, column - page], PageDown: [row, column + page], Home: [row, 0], End: [row, this.columns - 1],
    }[key];
    if (to) return this.move(...to);
    if (["+", "=", "-", "_", "0"].includes(key)) {
      this.zoom = key === "0" ? 1 : Math.max(1, Math.min(16, this.zoom * ("+=".includes(key) ? 2 : 0.5)));
      this.fit();
      return this.move(row, column);
    }
    const door = this.drawing.doors.find((each) => each.key === key);
    if (door) {
      const number = this.behind(door);
      if (number >= 0) this.go(number, key === "Escape" ? this.drawing.parent_row : null);
      return number >= 0;
    }
    const jump = this.drawing.jumps.find((each) => each.key === (key === "p" ? "n" : key));
    return jump ? this.jump(jump, key === "p" || by > 1) : false;
  }

  behind({ to }) {
    return (to[this.cursor.row] ?? []).map((name) => this.names.indexOf(name)).find((number) => number >= 0) ?? -1;
  }

  // To the next stop past the cursor, or the one before it; after the last comes the first.
  jump({ stops, same_row, in_order }, back) {
    const { row, column } = this.cursor;
    const all = stops.filter((stop) => !same_row || stop[0] === row);
    if (!all.length) return true;
    const order = back ? [...all].reverse() : all;
    const here = order.findIndex((stop) => (stop[0] ?? row) === row && stop[1] === column);
    const past = (stop) => (back ? -1 : 1) * (stop[1] - column || (stop[0] ?? row) - row) > 0;
    const next = here >= 0 ? order[here + 1] : in_order ? order[0] : order.find(past);
    const [to, at] = next ?? order[0];
    return this.move(to ?? row, at);
  }

  click(event) {
    const box = this.svg.getBoundingClientRect();
    const ratio = this.svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * ratio, y = (event.clientY - box.top) * ratio;
    const column = Math.floor((x - this.left) / this.step);
    const row = this.rows.findIndex(({ top, height }) => y >= top && y < top + height);
    if (row >= 0 && column >= 0 && column < this.columns) this.move(row, column);
  }

  move(row, column) {
    const within = (x, count) => Math.max(0, Math.min(count - 1, x));
    this.cursor = { row: within(row, this.rows.length), column: within(column, this.columns) };
    this.tell();
    const place = this.rows[this.cursor.row];
    if (!place || !this.columns) return true;
    const wide = Math.max(this.step, 9), high = Math.max(place.height, 9);
    const x = this.left + (this.cursor.column + 0.5) * this.step - wide / 2, y = place.top + (place.height - high) / 2;
    for (const ring of this.marks.children) {
      for (const [name, value] of Object.entries({ x, y, width: wide, height: high })) ring.setAttribute(name, value);
    }
    this.show(x, wide);
    [...this.groups ?? []][0]?.querySelectorAll("button").forEach((button, n) => {
      button.disabled = this.behind(this.drawing.doors[n]) < 0;
    });
    return true;
  }

  // Scrolls the picture alone, and no farther than it takes to see the cursor.
  show(x, wide) {
    const ratio = this.svg.getBoundingClientRect().width / this.svg.viewBox.baseVal.width;
    const start = x * ratio - 24, end = (x + wide) * ratio + 24 - this.area.clientWidth;
    if (this.area.scrollLeft > start) this.area.scrollLeft = start;
    else if (this.area.scrollLeft < end) this.area.scrollLeft = end;
  }

  fit() {
    this.svg.classList.toggle("zoomed", this.zoom > 1);
    this.svg.style.width = this.zoom > 1 ? `${this.svg.viewBox.baseVal.width * this.zoom}px` : "";
  }

  tell() {
    const { drawing, axis, cursor: { row, column } } = this;
    if (!drawing.rows.length || !this.columns) return this.values.replaceChildren(make("h4", {}, "Nothing was compared"));
    const pairs = drawing.cells.map(([name, words, cells]) => {
      const found = cells[row * this.columns + column];
      return [name, words && found !== null ? words[found] : found];
    });
    pairs.push(...axis.about.map(([name, all]) => [name, all[column]]));
    const list = make("dl");
    for (const [name, value] of pairs) {
      if (value === null || value === undefined || value === "") continue;
      list.append(make("dt", {}, name), make("dd", {}, typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 12 }) : value));
    }
    const title = [drawing.rows[row], axis.titles[column]].filter(Boolean).join(", ");
    this.values.replaceChildren(make("h4", {}, title), list);
    return true;
  }
}

async function startFigures() {
  const data = document.getElementById("data");
  if (!data) return;
  if (typeof DecompressionStream === "undefined") {
    const trouble = document.getElementById("trouble");
    trouble.textContent = "This browser cannot unpack the data of this page. The pictures and tables below hold the same.";
    trouble.hidden = false;
    return;
  }
  for (const [id, packed] of Object.entries(JSON.parse(data.textContent))) await new Figure(document.getElementById(id), packed).start();
}

startTheme();
startFolds();
startCopying();
startFigures().finally(() => requestAnimationFrame(() => {
  // What was put above it has moved it.
  showTarget();
  // For whoever waits for the page to be usable.
  root.dataset.ready = String(Math.round(performance.now()));
}));
