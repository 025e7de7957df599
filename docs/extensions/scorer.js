// Scores of search results: index entries first, then pages that explain, then generated references and evidence.
"use strict";

var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    if (kind === "index") return score + (docname === "reference/glossary" ? 35 : 40);
    if (/^reference\/(api|commands|packages)\//.test(docname)) return score - 12;
    if (docname.startsWith("evidence/")) return score - 12;
    if (/^(tutorials|how-to|explanation)\//.test(docname)) return score + 6;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
