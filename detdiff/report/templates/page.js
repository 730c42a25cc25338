// What every page has: the theme, folded parts that open for links and for paper, and commands to copy.
const root = document.documentElement;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function startTheme() {
  const button = document.getElementById("theme");
  const order = ["system", "light", "dark"];
  let now = 0;
  button.hidden = false;
  button.addEventListener("click", () => {
    now = (now + 1) % order.length;
    if (now) root.dataset.theme = order[now];
    else delete root.dataset.theme;
    button.textContent = `Theme: ${order[now]}`;
  });
}

function showTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (const fold of target.querySelectorAll("details.section")) fold.open = true;
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  // At once: what is drawn on the way would move the place that a smooth scroll aims at.
  target.scrollIntoView({ behavior: "instant" });
}

function startFolds() {
  addEventListener("hashchange", showTarget);
  for (const link of document.querySelectorAll('a[href^="#"]')) link.addEventListener("click", () => setTimeout(showTarget));
  showTarget();
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const fold of opened) fold.open = true;
  });
  addEventListener("afterprint", () => {
    for (const fold of opened) fold.open = false;
  });
}

function startCopying() {
  if (!navigator.clipboard) return;
  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
      button.textContent = "Copied";
    });
  }
}
