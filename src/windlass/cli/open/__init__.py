"""From the command line's words to an open model: names, plans, engines."""
