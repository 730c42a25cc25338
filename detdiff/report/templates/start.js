const VIEWS = { map: MapView, timeline: TimelineView, margins: MarginsView };

async function startViews() {
  const data = document.getElementById("data");
  const tools = document.querySelectorAll(".tool");
  if (!data || !tools.length) return;
  if (typeof DecompressionStream === "undefined" || typeof ResizeObserver === "undefined") {
    const trouble = document.getElementById("trouble");
    trouble.textContent = "This browser cannot unpack the data of this page. The pictures and tables below hold the same.";
    trouble.hidden = false;
    return;
  }
  const series = await Series.of(data.textContent);
  for (const tool of tools) {
    const View = VIEWS[tool.dataset.view];
    // What the page had no room for is a picture only.
    const known = View === TimelineView ? series.forwards.a + series.forwards.b : series.requests[tool.dataset.request];
    if (View && known) await new View(tool, series).start();
  }
}

startTheme();
startFolds();
startCopying();
startViews().finally(() => requestAnimationFrame(() => {
  // What was drawn above it has moved it.
  showTarget();
  // For whoever waits for the page to be usable.
  root.dataset.ready = String(Math.round(performance.now()));
}));
