"""What the ranks of a split model are told: values only."""
