"""From a Plan to running processes. Each way to start something is a pure `render` and, where we start it ourselves, a small rest."""
