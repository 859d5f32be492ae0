"""Our tensors and the stored ones they come from: names, parts, slices, readers."""
