"use strict";
// Tables that their heads sort, that can be copied, and that first show what matters most.
(() => {
  const key = ({ children }, column) => children[column].dataset.value ?? children[column].textContent;
  const compare = (one, other) => one - other || one.localeCompare(other, "en", { numeric: true });
  const sort = (table, column) => {
    const heads = [...table.querySelectorAll("thead th")];
    const upward = heads[column].ariaSort !== "ascending";
    heads.forEach((head) => (head.ariaSort = null));
    heads[column].ariaSort = upward ? "ascending" : "descending";
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => (upward ? 1 : -1) * compare(key(a, column), key(b, column)));
    table.tBodies[0].append(...rows);
  };
  const copy = async (table, told) => {
    const lines = [...table.rows].map((row) => [...row.children].map((cell) => cell.textContent.trim()).join("\t"));
    try {
      await navigator.clipboard.writeText(lines.join("\n"));
      told.textContent = `Copied ${lines.length - 1} rows.`;
    } catch {
      // A browser may refuse its clipboard to a page that was opened from a file.
      getSelection().selectAllChildren(table);
      told.textContent = "Selected: copy it with Ctrl-C.";
    }
  };
  document.querySelectorAll(".table").forEach((section) => {
    const table = section.querySelector("table");
    const on = (button, work) => button?.addEventListener("click", work);
    section.querySelectorAll(".sort").forEach((button, column) => on(button, () => sort(table, column)));
    on(section.querySelector(".copy"), () => copy(table, section.querySelector(".told")));
    const all = section.querySelector(".all");
    on(all, () => (all.ariaExpanded = String(!section.classList.toggle("few"))));
  });
})();
