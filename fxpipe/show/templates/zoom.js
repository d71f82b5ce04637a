// The view box of the step: x is in ms, zoomed and moved; y is in pixels, and stays.
"use strict";
const svg = document.getElementById("step");
const [, , whole, height] = svg.getAttribute("viewBox").split(" ").map(Number);
const numbers = [...svg.querySelectorAll("[data-room]")];
let start = 0;
let width = whole;

function show() {
  width = Math.min(whole, Math.max(whole / 1e4, width));
  start = Math.min(whole - width, Math.max(0, start));
  svg.setAttribute("viewBox", `${start} 0 ${width} ${height}`);
  const pixels = svg.clientWidth / width; // of a ms
  svg.style.setProperty("--narrow", 1 / pixels); // text keeps its shape
  for (const number of numbers) {
    const needed = 7 * number.textContent.length + 2;
    number.style.display = number.dataset.room * pixels < needed ? "none" : "";
  }
  drawTicks(pixels);
}

function drawTicks(pixels) {
  const least = 90 / pixels;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= least);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const ticks = [];
  for (let k = Math.ceil(start / step); k * step <= start + width; k++) {
    const x = k * step;
    const line = element("line", { x1: x, x2: x, y1: 16, y2: height });
    const text = element("text", { x: Math.max(x, start + 6 / pixels), y: 8 });
    text.textContent = x.toFixed(digits);
    ticks.push(line, text);
  }
  document.getElementById("ticks").replaceChildren(...ticks);
}

function element(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function zoom(factor, at = start + width / 2) {
  const share = (at - start) / width;
  width = Math.min(whole, Math.max(whole / 1e4, width * factor));
  start = at - share * width;
  show();
}

svg.addEventListener("wheel", (event) => {
  event.preventDefault();
  const left = svg.getBoundingClientRect().left;
  zoom(1.002 ** event.deltaY, start + ((event.clientX - left) / svg.clientWidth) * width);
}, { passive: false });

svg.addEventListener("pointerdown", (event) => svg.setPointerCapture(event.pointerId));
svg.addEventListener("pointermove", (event) => {
  if (!svg.hasPointerCapture(event.pointerId)) return;
  start -= (event.movementX / svg.clientWidth) * width;
  show();
});

for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => {
    zoom(button.dataset.zoom === "whole" ? Infinity : Number(button.dataset.zoom));
  });
}

svg.addEventListener("keydown", (event) => {
  if (event.key === "+") zoom(0.5);
  else if (event.key === "-") zoom(2);
  else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
    start += (event.key === "ArrowLeft" ? -0.2 : 0.2) * width;
    show();
  }
});

new ResizeObserver(show).observe(svg);
