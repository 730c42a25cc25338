// A picture that is used with the keyboard: a canvas with a cursor, and beside it what the cursor is on.
// Which of `count` places are in view.
class Span {
  constructor(count) {
    this.reset(count);
  }
  reset(count) {
    this.count = count;
    this.low = 0;
    this.high = count;
  }
  get width() {
    return this.high - this.low;
  }
  zoom(factor, at) {
    const width = Math.max(Math.min(8, this.count), Math.min(this.count, Math.round(this.width * factor)));
    this.low = Math.max(0, Math.min(this.count - width, Math.round(at - width / 2)));
    this.high = this.low + width;
  }
  follow(at) {
    if (at < this.low || at >= this.high) {
      const { width } = this;
      this.low = Math.max(0, Math.min(this.count - width, at - (width >> 1)));
      this.high = this.low + width;
    }
  }
}

class Stage {
  constructor(tool, { kind, help, keys, draw, press }) {
    const id = tool.parentElement.id;
    this.tool = tool;
    this.drawing = draw;
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.controls = make("div", { class: "controls", role: "group", "aria-label": `Controls: ${tool.dataset.title}` });
    this.area = make("div", {
      class: "stage", role: "application", tabindex: "0", "aria-roledescription": kind,
      "aria-label": `${tool.dataset.title}. ${help}`, "aria-describedby": `${id}-help`,
    }, this.canvas);
    this.values = make("div", { class: "values", role: "status", "aria-live": "polite", "aria-atomic": "true" });
    this.help = make("p", { class: "help", id: `${id}-help` });
    for (const [key, what] of keys) this.help.append(make("kbd", {}, key), ` ${what} `);
    this.legend = make("div", { class: "legend" });
    const picture = make("div", {}, this.area, this.legend);
    tool.append(this.controls, make("div", { class: "work" }, picture, this.values), this.help);
    this.area.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (press(event.key.length === 1 ? event.key.toLowerCase() : event.key, event.shiftKey ? 10 : 1)) {
        event.preventDefault();
      }
    });
    this.area.addEventListener("pointerdown", (event) => {
      const box = this.canvas.getBoundingClientRect();
      this.clicked?.(event.clientX - box.left, event.clientY - box.top);
    });
    tool.hidden = false;
    tool.parentElement.classList.add("live");
    themed.add(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.area);
  }

  button(words, act, label = words) {
    const button = make("button", { type: "button", "aria-label": label }, words);
    button.addEventListener("click", act);
    return button;
  }

  group(label, ...buttons) {
    const group = make("span", { class: "group", role: "group", "aria-label": label }, ...buttons);
    this.controls.append(group);
    return group;
  }

  select(label, changed) {
    const select = make("select");
    select.addEventListener("change", () => changed(select.value));
    this.controls.append(make("label", {}, label, select));
    return select;
  }

  show(title, pairs) {
    const list = make("dl");
    for (const [name, value] of pairs) list.append(make("dt", {}, name), make("dd", {}, String(value)));
    this.values.replaceChildren(make("h4", {}, title), list);
  }

  // Draws now, in pixels of the page; `height` is known only when the width is.
  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const ratio = Math.min(3, window.devicePixelRatio || 1);
    const context = this.canvas.getContext("2d");
    const resize = (height) => {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.font = "12px system-ui, sans-serif";
      context.textBaseline = "middle";
    };
    context.font = "12px system-ui, sans-serif";
    this.drawing(context, width, resize);
  }

  // One mark with its words; `paint` draws into 16 by 14 pixels.
  entry(words, paint) {
    const canvas = make("canvas", { "aria-hidden": "true", width: 32, height: 28 });
    canvas.style.width = "16px";
    canvas.style.height = "14px";
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    paint(context);
    return make("span", {}, canvas, words);
  }
}

// The picture's colours as they are at this moment.
function palette() {
  const style = getComputedStyle(root);
  return new Proxy({}, { get: (_, name) => style.getPropertyValue(`--dd-${name}`).trim() });
}

function diamond(context, x, y, r) {
  context.beginPath();
  context.moveTo(x - r, y);
  context.lineTo(x, y - r);
  context.lineTo(x + r, y);
  context.lineTo(x, y + r);
  context.closePath();
}

function triangle(context, x, y, r) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - r, y - 1.5 * r);
  context.lineTo(x + r, y - 1.5 * r);
  context.closePath();
}

function outlined(context, inside, outside) {
  context.lineJoin = "round";
  context.strokeStyle = outside;
  context.lineWidth = 3;
  context.stroke();
  context.fillStyle = inside;
  context.fill();
}

function hatch(context, colour, background = null) {
  const tile = make("canvas", { width: 6, height: 6 });
  const inner = tile.getContext("2d");
  if (background) {
    inner.fillStyle = background;
    inner.fillRect(0, 0, 6, 6);
  }
  inner.strokeStyle = colour;
  inner.lineWidth = 1.2;
  inner.beginPath();
  for (const shift of [-6, 0, 6]) {
    inner.moveTo(shift, 6);
    inner.lineTo(shift + 6, 0);
  }
  inner.stroke();
  return context.createPattern(tile, "repeat");
}

function vertical(context, x, top, bottom, colour, dash = []) {
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(x, top);
  context.lineTo(x, bottom);
  context.stroke();
  context.setLineDash([]);
}

function ring(context, x, y, width, height, colours, least = 7) {
  const wide = Math.max(width, least), high = Math.max(height, least);
  const left = x + (width - wide) / 2, top = y + (height - high) / 2;
  for (const [colour, line] of [[colours.bg, 5], [colours.ink, 2.5]]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(left, top, wide, high);
  }
}

// Round numbers along an axis, with a small line each.
function ticks(context, span, left, right, y, colours) {
  const most = Math.max(2, Math.floor((right - left) / 70));
  const raw = Math.max(1, span.width / most);
  const ten = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= raw);
  const cell = (right - left) / span.width;
  context.textAlign = "center";
  for (let n = Math.ceil(span.low / step) * step; n < span.high; n += step) {
    const x = left + (n - span.low + 0.5) * cell;
    context.fillStyle = colours.axis;
    context.fillRect(x - 0.5, y, 1, 4);
    context.fillStyle = colours.soft;
    context.fillText(n.toLocaleString("en"), Math.min(right - 12, Math.max(left + 6, x)), y + 12);
  }
}

function fitted(context, words, width) {
  if (context.measureText(words).width <= width) return words;
  let kept = words;
  while (kept && context.measureText(`…${kept}`).width > width) kept = kept.slice(1);
  return `…${kept}`;
}
