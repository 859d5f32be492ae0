"""Where a rank's weights live: device memory, host memory or disk. Values and pure functions, shared by the planner and the engine."""
