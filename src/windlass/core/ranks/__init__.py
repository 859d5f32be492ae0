"""How the ranks of a split model are placed and find each other: values only."""
