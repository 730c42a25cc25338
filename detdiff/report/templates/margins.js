// Margins: how far each generated token was from another choice, beside how far the other run moved it.
class MarginsView {
  constructor(tool, series) {
    this.request = series.requests[Number(tool.dataset.request)];
    const { tokens } = this.request;
    this.tokens = tokens;
    this.known = tokens.index.map((_, n) => n).filter((n) => tokens.margin[n] !== null);
    this.order = [...this.known].sort((one, other) => tokens.margin[one] - tokens.margin[other]);
    this.span = new Span(tokens.index.length);
    this.place = Math.max(0, tokens.index.indexOf(this.request.flip));
    const positive = [...tokens.margin, ...tokens.delta.map((x) => x && Math.abs(x))].filter((x) => x > 0);
    const least = positive.reduce((x, y) => Math.min(x, y), Infinity), most = positive.reduce((x, y) => Math.max(x, y), 0);
    this.low = Math.floor(Math.log10(positive.length ? least : 0.1));
    this.high = Math.max(this.low + 1, Math.ceil(Math.log10(positive.length ? most : 1)));
    this.stage = new Stage(tool, {
      kind: "chart",
      help: "Left and right go through the tokens; values are read out beside the picture.",
      keys: [
        ["← →", "another token, with Shift by 10."], ["+ −", "zoom,"], ["0", "shows all,"], ["Home End", "go to the ends."],
        ...(this.request.flip === null ? [] : [["F", "flip,"]]), ["N P", "the token with the next larger or smaller margin."],
      ],
      draw: (...all) => this.draw(...all),
      press: (key, by) => this.press(key, by),
    });
    this.stage.clicked = (x) => {
      const place = this.span.low + Math.floor((x - this.plan.left) / this.plan.cell);
      if (place < this.span.low || place >= this.span.high) return;
      this.place = place;
      this.refresh();
    };
    const { stage } = this;
    stage.group(
      "Tokens",
      stage.button("−", () => this.press("-", 1), "Zoom out"),
      stage.button("+", () => this.press("+", 1), "Zoom in"),
      stage.button("All", () => this.press("0", 1), "Show all tokens"),
    );
    const jumps = [stage.button("Smallest margin", () => this.press("s", 1)), stage.button("Next larger", () => this.press("n", 1))];
    if (this.request.flip !== null) jumps.unshift(stage.button("Flip", () => this.press("f", 1)));
    stage.group("Go to", ...jumps);
  }

  async start() {
    this.refresh();
  }

  press(key, by) {
    const { span, tokens } = this;
    const go = (place) => {
      if (place === undefined || place < 0) return;
      this.place = Math.min(tokens.index.length - 1, place);
      span.follow(this.place);
    };
    const rank = this.order.indexOf(this.place);
    switch (key) {
      case "ArrowLeft": go(Math.max(0, this.place - by)); break;
      case "ArrowRight": go(this.place + by); break;
      case "Home": go(0); break;
      case "End": go(tokens.index.length - 1); break;
      case "PageUp": go(Math.max(0, this.place - span.width)); break;
      case "PageDown": go(this.place + span.width); break;
      case "+": case "=": span.zoom(0.5, this.place); break;
      case "-": case "_": span.zoom(2, this.place); break;
      case "0": span.reset(span.count); break;
      case "f": go(tokens.index.indexOf(this.request.flip)); break;
      case "s": go(this.order[0]); break;
      case "n": go(this.order[rank + 1]); break;
      case "p": go(this.order[rank - 1]); break;
      default: return false;
    }
    this.refresh();
    return true;
  }

  fragile(n) {
    const { margin, delta } = this.tokens;
    return margin[n] !== null && delta[n] !== null && delta[n] !== 0 && Math.abs(delta[n]) >= margin[n];
  }

  refresh() {
    this.stage.draw();
    const { tokens, place } = this;
    const other = tokens.other[tokens.index[place]];
    const number = (x, sign = "") => (x === null ? "not known" : `${x > 0 ? sign : ""}${x.toFixed(6)}`);
    const pairs = [
      ["text", `"${tokens.text[place]}"${other === undefined ? "" : ` in a, "${other}" in b`}`],
      ["chosen at", `position ${tokens.position[place]}`],
      ["margin in a", number(tokens.margin[place])],
      ["moved in b by", number(tokens.delta[place], "+")],
    ];
    if (tokens.index[place] === this.request.flip) pairs.unshift(["here", "the flip"]);
    if (this.fragile(place)) pairs.push(["note", "moved by at least its margin"]);
    this.stage.show(`Token ${tokens.index[place]} of ${tokens.index.length}`, pairs);
  }

  draw(context, width, resize) {
    const { span, tokens } = this;
    const left = 56, cell = Math.min(60, (width - left - 8) / span.width);
    this.plan = { left, cell };
    const top = 24, height = 220, bottom = top + height, right = left + cell * span.width;
    resize(bottom + 26);
    const colours = palette();
    const y = (value) => (value > 0 ? top + (height - 20) * (1 - (Math.log10(value) - this.low) / (this.high - this.low)) : bottom - 6);
    context.textAlign = "right";
    for (let n = this.low; n <= this.high; n++) {
      context.fillStyle = colours.grid;
      context.fillRect(left, y(10 ** n), right - left, 1);
      context.fillStyle = colours.soft;
      context.fillText(Math.abs(n) < 4 ? String(Number((10 ** n).toPrecision(1))) : `1e${n}`, left - 8, y(10 ** n));
    }
    context.fillStyle = colours.soft;
    context.fillText("0", left - 8, bottom - 6);
    context.fillStyle = colours.axis;
    context.fillRect(left, bottom, right - left, 1);
    ticks(context, span, left, right, bottom, colours);
    const flip = tokens.index.indexOf(this.request.flip);
    if (flip >= span.low && flip < span.high) {
      const x = left + (flip - span.low + 0.5) * cell;
      vertical(context, x, top - 8, bottom, colours.ink, [5, 3]);
      triangle(context, x, top - 8, 5);
      outlined(context, colours.ink, colours.bg);
      context.textAlign = x > right - 60 ? "right" : "left";
      context.fillText("flip", x + (x > right - 60 ? -9 : 9), top - 13);
    }
    const radius = Math.min(4, Math.max(1.6, cell / 2));
    for (let n = span.low; n < span.high; n++) {
      const x = left + (n - span.low + 0.5) * cell;
      if (tokens.delta[n] !== null) this.mark(context, x, y(Math.abs(tokens.delta[n])), radius, colours.b, "moved");
      if (tokens.margin[n] !== null) this.mark(context, x, y(tokens.margin[n]), radius, colours.a, "margin");
      if (this.fragile(n)) this.mark(context, x, y(tokens.margin[n]), radius + 3, colours.near, "fragile");
    }
    ring(context, left + (this.place - span.low) * cell, top, cell, height, colours);
    if (this.legend !== colours.bg) this.drawLegend(colours);
    this.legend = colours.bg;
  }

  mark(context, x, y, r, colour, kind) {
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = 1.4;
    context.beginPath();
    if (kind === "moved") {
      context.moveTo(x - r, y);
      context.lineTo(x + r, y);
      context.stroke();
    } else {
      context.arc(x, y, r, 0, 2 * Math.PI);
      if (kind === "margin") context.fill();
      else context.stroke();
    }
  }

  drawLegend(colours) {
    const { stage } = this;
    stage.legend.replaceChildren(
      stage.entry("margin in a", (context) => this.mark(context, 8, 7, 4, colours.a, "margin")),
      stage.entry("by how much it moved in b", (context) => this.mark(context, 8, 7, 5, colours.b, "moved")),
      stage.entry("moved by at least its margin", (context) => this.mark(context, 8, 7, 6, colours.near, "fragile")),
    );
  }
}
