"""Files and batches: requests that are worked off in the background, when there is room."""
