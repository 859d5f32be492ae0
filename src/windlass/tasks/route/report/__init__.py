"""What a router gains: numbers with intervals, the Pareto plot, the page."""
