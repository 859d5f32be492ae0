// Runs before the first paint (so it is no module): a chosen theme never flashes in as the other one.
(() => {
  try {
    const chosen = localStorage.getItem("windlass.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // No storage: the system's theme it is.
  }
})();
