// Tables that are wider than the page are scrolled by the keyboard, too, in every browser.
const reachTables = () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) {
    const scrolls = table.scrollWidth > table.clientWidth;
    table.tabIndex = scrolls ? 0 : -1;
  }
};
addEventListener("load", reachTables);
addEventListener("resize", reachTables);
// Each block of code has a bar with its button, which is no place to go to from elsewhere.
addEventListener("load", () => {
  for (const bar of document.querySelectorAll(".md-code__nav")) bar.role = "none";
});
