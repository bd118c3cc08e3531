// The page without this script is whole; with it, drawings answer to pointer and keyboard, and the theme can be chosen.
(() => {
  "use strict";
  const report = JSON.parse(document.getElementById("report").textContent);
  const root = document.documentElement;

  // -- theme: the system's until chosen

  const button = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const label = () => {
    button.setAttribute("aria-pressed", String(dark()));
    button.textContent = dark() ? "Light" : "Dark";
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    label();
  });
  label();

  // -- drawings

  const make = (tag, text, className) => {
    const element = document.createElement(tag);
    element.textContent = text;
    if (className) element.className = className;
    return element;
  };

  // What stands in the box: its formula, nodes, and where in the model they come from.
  const describe = (pane, drawing, places) => {
    const dots = places.map((place) => drawing.dots[place]);
    const first = dots[0];
    const head = make("p", "", "head");
    head.append(make("strong", first.step), make("span", ` ${first.role}`, "soft"));
    pane.replaceChildren(head);
    pane.classList.add("used");
    const formula = drawing.formulas[first.step];
    if (formula) pane.append(make("p", formula, "formula"));
    const list = make("ul", "");
    for (const dot of dots) {
      const item = make("li", "");
      item.append(make("code", dot.name), make("span", [dot.op, dot.tensor].filter(Boolean).join("  "), "soft"));
      list.append(item);
    }
    pane.append(list);
    for (const source of new Set(dots.map((dot) => dot.source).filter(Boolean))) pane.append(make("p", source, "source"));
  };

  const middle = (dot) => {
    const box = dot.getBBox();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };

  // The nearest box that lies in the direction of the arrow key; what is off the axis counts double.
  const neighbour = (dots, from, key) => {
    const across = key === "ArrowLeft" || key === "ArrowRight";
    const sign = key === "ArrowRight" || key === "ArrowDown" ? 1 : -1;
    const [x, y] = middle(from);
    let best = null, least = Infinity;
    for (const dot of dots) {
      const [a, b] = middle(dot);
      const ahead = sign * (across ? a - x : b - y);
      const distance = ahead + 2 * Math.abs(across ? b - y : a - x);
      if (dot !== from && ahead > 1 && distance < least) [best, least] = [dot, distance];
    }
    return best;
  };

  for (const svg of document.querySelectorAll("svg.drawing")) {
    const [picture, side] = svg.dataset.picture.split(".");
    const drawing = report.pictures[picture][side];
    const pane = svg.closest("figure").querySelector(".detail");
    const dots = [...svg.querySelectorAll(".dot")];
    const edges = [...svg.querySelectorAll(".edge")];
    let pinned = null;

    const show = (dot) => {
      const index = dots.indexOf(dot);
      for (const other of dots) other.classList.toggle("shown", other === dot);
      for (const edge of edges) edge.classList.toggle("lit", edge.dataset.ends.split(",").map(Number).includes(index));
      describe(pane, drawing, dot.dataset.dots.split(",").map(Number));
    };
    const pin = (dot) => {
      pinned = dot;
      for (const other of dots) other.setAttribute("aria-pressed", String(other === dot));
      if (dot) show(dot);
    };
    const focus = (dot) => {
      for (const other of dots) other.setAttribute("tabindex", other === dot ? "0" : "-1");
      dot.focus();
    };

    for (const dot of dots) {
      // Not mouseenter: where the page scrolls below a pointer at rest, the keyboard has moved, not the pointer.
      dot.addEventListener("mousemove", () => { if (!pinned && !dot.classList.contains("shown")) show(dot); });
      dot.addEventListener("focus", () => { if (!pinned) show(dot); });
      dot.addEventListener("click", () => { focus(dot); pin(pinned === dot ? null : dot); });
      dot.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) {
          const next = neighbour(dots, dot, event.key);
          if (next) { pin(null); focus(next); }
        } else if (event.key === "Enter" || event.key === " ") {
          pin(pinned === dot ? null : dot);
        } else if (event.key === "Escape") {
          pin(null);
        } else {
          return;
        }
        event.preventDefault();
      });
    }
  }

  // -- print: on paper nothing can be opened

  const opened = [];
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details.layers:not([open])")) {
      details.open = true;
      opened.push(details);
    }
  });
  addEventListener("afterprint", () => { while (opened.length) opened.pop().open = false; });
})();
