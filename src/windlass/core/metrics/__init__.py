"""One vocabulary of metrics: every name that any part of Windlass exports, with its kind, unit and help, and the text format."""
