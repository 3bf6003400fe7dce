// Reads the data and builds charts, viewers, and the buttons that copy the command or save numbers.

const page = JSON.parse(document.getElementById("data").textContent);
for (const host of document.querySelectorAll("[data-chart]")) {
  new ChartView(host, page.charts[host.dataset.chart]);
}
const viewers = [];
for (const host of document.querySelectorAll("[data-viewer]")) {
  const number = host.dataset.viewer;
  viewers.push(new AttentionViewer(host, number, page.viewers[number]));
}
const command = document.getElementById("command");
if (command) command.after(copyButton(command));
document.querySelector("footer").append(saveButtons("all numbers", {JSON: savePageNumbers}));
