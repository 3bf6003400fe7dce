const page = JSON.parse(document.getElementById("data").textContent);
for (const name in page.colours) page.colours[name] = colours(page.colours[name]);
document.querySelectorAll("[data-chart]").forEach(host => chart(host, page.charts[host.dataset.chart]));
document.querySelectorAll("[data-viewer]").forEach(host => {
  new AttentionViewer(host, host.dataset.viewer, page.viewers[host.dataset.viewer]);
});
