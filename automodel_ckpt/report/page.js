"use strict";
// Hovering a chart shows the values at the step under the pointer.
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
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
    if (x < left || x > right) return leave();
    const step = low + (x - left) / (right - left) * (high - low);
    const at = lines.map(line => line.steps[nearest(line.steps, step)]);
    const here = at.reduce((a, b) => Math.abs(b - step) < Math.abs(a - step) ? b : a, at[0]);
    tip.replaceChildren(text("div", "step " + here));
    for (const line of lines) {
      const index = nearest(line.steps, here);
      if (line.steps[index] !== here) continue;
      const row = document.createElement("div");
      row.append(text("span", "", "key c" + line.colour), line.label + ": " + Number(line.values[index].toPrecision(6)));
      tip.append(row);
    }
    const place = left + (here - low) / (high - low) * (right - left);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    tip.hidden = false;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  });
  function leave() {
    tip.hidden = true;
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
  }
  svg.addEventListener("pointerleave", leave);
}
