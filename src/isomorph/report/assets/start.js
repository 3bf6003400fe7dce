// Reads the page's data and builds its charts and viewers.

const page = JSON.parse(document.getElementById("data").textContent);
for (const name in page.colours) page.colours[name] = decodeColours(page.colours[name]);
for (const host of document.querySelectorAll("[data-chart]")) {
  new ChartView(host, page.charts[host.dataset.chart]);
}
for (const host of document.querySelectorAll("[data-viewer]")) {
  const number = host.dataset.viewer;
  new AttentionViewer(host, number, page.viewers[number]);
}
