// Tables that are wider than the page are scrolled by the keyboard, too, in every browser.
const reachTables = () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) {
    const scrolls = table.scrollWidth > table.clientWidth;
    table.tabIndex = scrolls ? 0 : -1;
  }
};
addEventListener("load", reachTables);
addEventListener("resize", reachTables);
