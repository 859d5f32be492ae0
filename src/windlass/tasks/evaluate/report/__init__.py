"""From a journal to scores with intervals, comparisons, pages and exports."""
