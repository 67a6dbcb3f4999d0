"use strict";
// A chart shows the values at the step under the pointer, or, in focus, at one that the arrow keys choose.
const tip = document.getElementById("tip"), left = 62, right = 846, width = 860;
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}
function text(tag, content, name) {
  const element = document.createElement(tag);
  element.textContent = content;
  if (name) element.className = name;
  return element;
}
for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const lines = JSON.parse(figure.querySelector("script").textContent);
  const low = +svg.dataset.low, high = +svg.dataset.high;
  const steps = [...new Set(lines.flatMap(line => line.steps))].sort((a, b) => a - b);
  let at = steps.length - 1;
  function show(index, x, y) {
    at = index;
    const here = steps[at], place = left + (here - low) / (high - low) * (right - left);
    tip.replaceChildren(text("div", "step " + here.toLocaleString("en")));
    for (const line of lines) {
      const index = nearest(line.steps, here);
      if (line.steps[index] !== here) continue;
      const row = document.createElement("div");
      row.append(text("span", "", "key c" + line.colour), line.label + ": " + Number(line.values[index].toPrecision(6)));
      tip.append(row);
    }
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    tip.hidden = false;
    const box = svg.getBoundingClientRect();
    x = x ?? box.left + place / width * box.width;
    y = y ?? box.top + 14;
    tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(8, Math.min(y + 14, innerHeight - tip.offsetHeight - 8)) + "px";
  }
  function pointed(event) {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
    if (x < left || x > right) return leave();
    show(nearest(steps, low + (x - left) / (right - left) * (high - low)), event.clientX, event.clientY);
  }
  svg.addEventListener("pointermove", pointed);
  svg.addEventListener("pointerdown", pointed);
  svg.addEventListener("keydown", event => {
    const to = {ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: steps.length - 1}[event.key];
    if (event.key === "Escape") leave();
    if (to === undefined) return;
    event.preventDefault();
    show(Math.max(0, Math.min(to, steps.length - 1)));
  });
  svg.addEventListener("blur", leave);
  function leave() {
    tip.hidden = true;
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
  }
  svg.addEventListener("pointerleave", leave);
}
