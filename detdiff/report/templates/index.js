// A table that is sorted by its headers.
function startSorting(table) {
  const headers = [...table.querySelectorAll("thead th")];
  headers.forEach((header, column) => {
    const button = header.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const ascending = header.getAttribute("aria-sort") !== "ascending";
      for (const other of headers) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const numeric = button.dataset.numeric !== undefined;
      const rows = [...table.tBodies[0].rows];
      const compare = (x, y) => (numeric ? Number(value(x)) - Number(value(y)) : value(x).localeCompare(value(y), "en"));
      rows.sort((x, y) => (ascending ? compare(x, y) : compare(y, x)));
      table.tBodies[0].append(...rows);
    });
  });
}

function startFilters(table) {
  const selects = [...document.querySelectorAll(".filters select")];
  const buttons = [...document.querySelectorAll(".filters button")];
  const apply = () => {
    const hidden = new Set(buttons.filter((b) => b.getAttribute("aria-pressed") === "false").map((b) => b.dataset.kind));
    const wanted = selects.filter((select) => select.value).map((select) => [`f${select.dataset.filter}`, select.value]);
    const hides = (each) => hidden.has(each.dataset.kind) || wanted.some(([name, value]) => each.dataset[name] !== value);
    for (const each of [...table.tBodies[0].rows, ...document.querySelectorAll(".multiples figure")]) each.hidden = hides(each);
    const shown = [...table.tBodies[0].rows].filter((row) => !row.hidden).length;
    document.getElementById("shown").textContent = `${shown} of ${table.tBodies[0].rows.length} shown`;
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      apply();
    });
  }
  for (const select of selects) select.addEventListener("change", apply);
}

startTheme();
const table = document.querySelector("table.index");
if (table) {
  startSorting(table);
  startFilters(table);
}
root.dataset.ready = String(Math.round(performance.now()));
