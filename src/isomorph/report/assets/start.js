// Reads the page's data and builds its charts, viewers, and the button that saves its numbers.

const page = JSON.parse(document.getElementById("data").textContent);
for (const host of document.querySelectorAll("[data-chart]")) {
  new ChartView(host, page.charts[host.dataset.chart]);
}
const viewers = [];
for (const host of document.querySelectorAll("[data-viewer]")) {
  const number = host.dataset.viewer;
  viewers.push(new AttentionViewer(host, number, page.viewers[number]));
}
document.querySelector("footer").append(saveButtons("all numbers", {JSON: savePageNumbers}));
