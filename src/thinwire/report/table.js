"use strict";
// Tables that their heads sort, that can be copied, and that first show what matters most.
(() => {
  const key = (row, column) => {
    const value = row.children[column].dataset.value;
    return value !== "" && Number.isFinite(Number(value)) ? Number(value) : value;
  };
  const compare = (one, other) =>
    typeof one === "number" && typeof other === "number"
      ? one - other
      : String(one).localeCompare(String(other), "en", { numeric: true });

  const sort = (table, column) => {
    const heads = [...table.querySelectorAll("thead th")];
    const upward = heads[column].getAttribute("aria-sort") !== "ascending";
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", upward ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => (upward ? 1 : -1) * compare(key(a, column), key(b, column)));
    table.tBodies[0].append(...rows);
  };

  const text = (table) =>
    [...table.rows]
      .map((row) => [...row.children].map((cell) => cell.textContent.trim()).join("\t"))
      .join("\n");

  // A browser may refuse its clipboard to a page that was opened from a file.
  const byHand = (content) => {
    const area = document.createElement("textarea");
    area.value = content;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  const copy = async (table, told) => {
    const content = text(table);
    let done = true;
    try {
      await navigator.clipboard.writeText(content);
    } catch {
      done = byHand(content);
    }
    told.textContent = done ? `Copied ${table.tBodies[0].rows.length} rows.` : "Select and copy.";
  };

  // A button that shows what of a table is put away: `kind` is columns (in a narrow window; page.css
  // says which) or rows.
  const fold = (table, kind, words) => {
    const section = table.closest(".table");
    const button = document.createElement("button");
    const show = (all) => {
      table.classList.toggle(`few-${kind}`, !all);
      button.setAttribute("aria-expanded", String(all));
    };
    button.type = "button";
    button.className = `fold ${kind}`;
    button.textContent = words;
    button.dataset.keep = `${kind} of ${section.querySelector("h3").textContent}`;
    button.addEventListener("click", () => show(button.getAttribute("aria-expanded") !== "true"));
    button.setAttribute("aria-expanded", "false");
    section.querySelector(".tools").append(button);
  };
  document.querySelectorAll("table[data-main]").forEach((table) => {
    const away = table.tHead.rows[0].cells.length - table.dataset.main.split(" ").length;
    fold(table, "columns", `${away} more columns`);
  });
  document.querySelectorAll("table[data-rest]").forEach((table) => {
    fold(table, "rows", `${table.dataset.rest} more methods`);
  });

  document.querySelectorAll(".sortable").forEach((section) => {
    const table = section.querySelector("table");
    section
      .querySelectorAll("button.sort")
      .forEach((button, column) => button.addEventListener("click", () => sort(table, column)));
    const told = section.querySelector(".told");
    section.querySelector("button.copy").addEventListener("click", () => copy(table, told));
  });
})();
