"""The web page at `/`: a chat and live metrics, in plain HTML, CSS and JavaScript modules without a build step."""
