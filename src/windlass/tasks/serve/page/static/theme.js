// Not a module, so that it runs before the first paint and the wrong theme never flashes.
(() => {
  try {
    const chosen = localStorage.getItem("windlass.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // No storage: use the system's theme.
  }
})();
