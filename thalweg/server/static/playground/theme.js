// Runs in the head, before the first paint: the theme that was chosen on an earlier visit.
"use strict";
try {
  const chosen = localStorage.getItem("thalweg.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch { /* storage is forbidden: the system's theme it is */ }
