"use strict";
const tip = document.getElementById("tip"), LEFT = 56, RIGHT = 14, TOP = 12, BOTTOM = 38, W = 640, H = 250;
const short = v => v === null ? "–" : Math.abs(v) >= 1e6 || (v && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(4));
function showTip(event, html) {
  tip.innerHTML = html;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.min(event.clientX + 14, innerWidth - box.width - 8) + "px";
  tip.style.top = Math.max(4, event.clientY - box.height - 12) + "px";
}
const escaped = text => { const e = document.createElement("span"); e.textContent = text; return e.innerHTML; };
for (const svg of document.querySelectorAll("svg.chart[data-chart]")) {
  const data = JSON.parse(svg.dataset.chart), [x0, x1] = data.x;
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor"); cursor.setAttribute("y1", TOP); cursor.setAttribute("y2", H - BOTTOM);
  svg.addEventListener("mousemove", event => {
    const box = svg.getBoundingClientRect();
    const at = x0 + ((event.clientX - box.left) * W / box.width - LEFT) / (W - LEFT - RIGHT) * (x1 - x0);
    let nearest = null;
    for (const s of data.s) for (const x of s.x) if (nearest === null || Math.abs(x - at) < Math.abs(nearest - at)) nearest = x;
    if (nearest === null) return;
    const px = LEFT + (nearest - x0) / ((x1 - x0) || 1) * (W - LEFT - RIGHT);
    cursor.setAttribute("x1", px); cursor.setAttribute("x2", px); svg.appendChild(cursor);
    let html = `<b>${escaped(data.xl)} ${short(nearest)}</b>`;
    for (const s of data.s) {
      const i = s.x.indexOf(nearest);
      if (i >= 0 && s.y[i] !== null) html += `<br><i style="background:${s.c}"></i>${escaped(s.n)}: ${short(s.y[i])}`;
    }
    showTip(event, html);
  });
  svg.addEventListener("mouseleave", () => { tip.style.display = "none"; cursor.remove(); });
}
for (const plot of document.querySelectorAll(".plot")) {
  const svg = plot.querySelector("svg"), times = plot.querySelectorAll(".times span"), total = +svg.dataset.total, rows = +svg.dataset.rows;
  let [start, , width] = svg.getAttribute("viewBox").split(" ").map(Number);
  function look(newStart, newWidth) {
    width = Math.min(total, Math.max(20, newWidth));
    start = Math.min(total - width, Math.max(0, newStart));
    svg.setAttribute("viewBox", `${start} 0 ${width} ${rows}`);
    times.forEach((t, i) => { t.textContent = ((start + width * i / (times.length - 1)) / 1000).toFixed(width < 3000 ? 2 : 1) + " s"; });
  }
  const at = event => { const b = svg.getBoundingClientRect(); return (event.clientX - b.left) / b.width; };
  svg.addEventListener("wheel", event => {
    event.preventDefault();
    const share = at(event), factor = Math.exp(event.deltaY * 0.0015);
    const next = Math.min(total, Math.max(20, width * factor));
    look(start + share * (width - next), next);
  }, { passive: false });
  let drag = null;
  svg.addEventListener("pointerdown", event => { drag = [at(event), start]; svg.setPointerCapture(event.pointerId); });
  svg.addEventListener("pointermove", event => { if (drag) look(drag[1] - (at(event) - drag[0]) * width, width); });
  svg.addEventListener("pointerup", () => { drag = null; });
  for (const button of plot.closest(".card").querySelectorAll("button"))
    button.addEventListener("click", () => {
      const ms = 1000 * button.dataset.span;
      if (ms) look(total - ms, ms); else look(0, total);
    });
}
