// Adds an excerpt of the page to each search result. The texts of the pages are in page_texts.js.
"use strict";

const EXCERPT_LENGTH = 240;

const excerptOf = (text, words) => {
  const lower = text.toLowerCase();
  const found = words.map((word) => lower.indexOf(word)).filter((at) => at >= 0);
  const start = Math.max((found.length ? Math.min(...found) : 0) - EXCERPT_LENGTH / 3, 0);
  const end = Math.min(start + EXCERPT_LENGTH, text.length);
  return (start ? "… " : "") + text.slice(start, end).trim() + (end < text.length ? " …" : "");
};

const addExcerpts = () => {
  const query = new URLSearchParams(window.location.search).get("q") || "";
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const root = new URL(document.documentElement.dataset.content_root || "./", window.location.href);
  for (const item of document.querySelectorAll("#search-results ul.search > li:not([data-excerpt])")) {
    item.dataset.excerpt = "yes";
    const link = item.querySelector("a");
    const page = link && link.href.slice(root.href.length).replace(/\.html.*$/, "");
    if (!page || !(page in PAGE_TEXTS)) continue;
    const paragraph = document.createElement("p");
    paragraph.className = "context";
    paragraph.textContent = excerptOf(PAGE_TEXTS[page], words);
    item.append(paragraph);
  }
};

document.addEventListener("DOMContentLoaded", () => {
  const results = document.getElementById("search-results");
  if (results) new MutationObserver(addExcerpts).observe(results, { childList: true, subtree: true });
});
