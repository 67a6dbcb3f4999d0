"use strict";
// A chart shows the values at the step under the pointer or, in focus, at one that the arrow keys choose.
const tip = document.getElementById("tip");
function nearest(points, x) {
  return points.reduce((best, point) => Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best);
}
function row(content, key) {
  const element = document.createElement("div");
  if (key) element.append(key);
  element.append(content);
  tip.append(element);
}
for (const svg of document.querySelectorAll(".plot")) {
  const cursor = svg.querySelector(".cursor"), axes = [svg.dataset.x, svg.dataset.y].map(text => text.split(" ").map(Number));
  const value = (axis, at) => axes[axis][0] + at / 1000 * (axes[axis][1] - axes[axis][0]);
  const lines = [...svg.querySelectorAll("polyline")].map(line => [line, [...line.points]]);
  const points = lines.flatMap(line => line[1]).sort((a, b) => a.x - b.x);
  let at = 1000;
  function show(x) {
    at = nearest(points, x).x;
    tip.replaceChildren();
    row("step " + Math.round(value(0, at)).toLocaleString("en"));
    for (const [line, own] of lines) {
      const point = nearest(own, at), key = document.createElement("b");
      if (Math.abs(point.x - at) > 4) continue;
      key.className = "key " + line.className.baseVal;
      key.textContent = "■ ";
      row(line.dataset.label + ": " + Number(value(1, 1000 - point.y).toPrecision(5)), key);
    }
    cursor.setAttribute("x1", at / 10 + "%");
    cursor.setAttribute("x2", at / 10 + "%");
    tip.hidden = false;
    const box = svg.getBoundingClientRect(), left = box.left + at / 1000 * box.width + 14;
    tip.style.left = (left + tip.offsetWidth < innerWidth ? left : Math.max(8, left - 28 - tip.offsetWidth)) + "px";
    tip.style.top = Math.max(8, box.top + 8) + "px";
  }
  function leave() {
    tip.hidden = true;
    cursor.setAttribute("x1", -99);
    cursor.setAttribute("x2", -99);
  }
  function pointed(event) {
    const box = svg.getBoundingClientRect();
    show((event.clientX - box.left) / box.width * 1000);
  }
  svg.tabIndex = 0;
  svg.addEventListener("pointermove", pointed);
  svg.addEventListener("pointerdown", pointed);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", event => {
    const later = points.filter(point => point.x > at), earlier = points.filter(point => point.x < at);
    const to = {ArrowLeft: earlier.at(-1), ArrowRight: later[0], Home: points[0], End: points.at(-1)}[event.key];
    if (event.key === "Escape") leave();
    if (!to) return;
    event.preventDefault();
    show(to.x);
  });
}
