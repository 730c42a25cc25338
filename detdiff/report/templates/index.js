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
  for (const button of document.querySelectorAll(".filters button")) {
    button.addEventListener("click", () => {
      const pressed = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!pressed));
      const hidden = new Set([...document.querySelectorAll('.filters button[aria-pressed="false"]')].map((b) => b.dataset.kind));
      for (const row of table.tBodies[0].rows) row.hidden = hidden.has(row.dataset.kind);
      const shown = [...table.tBodies[0].rows].filter((row) => !row.hidden).length;
      document.getElementById("shown").textContent = `${shown} of ${table.tBodies[0].rows.length} shown`;
    });
  }
}

startTheme();
const table = document.querySelector("table.index");
if (table) {
  startSorting(table);
  startFilters(table);
}
root.dataset.ready = String(Math.round(performance.now()));
