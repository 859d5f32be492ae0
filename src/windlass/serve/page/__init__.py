"""The page at `/`: a chat and live numbers, as plain HTML, CSS and JavaScript modules that nothing has to build."""
