// Browsers do not let a page that was opened from disk read the search index, and the search box is left out: say how.
if (location.protocol === "file:") {
  const note = document.createElement("span");
  note.className = "search-note";
  note.textContent = "to search: python -m http.server -d site, then localhost:8000";
  document.querySelector(".md-header__inner")?.append(note);
}
