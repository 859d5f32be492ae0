"""From a name and a Launch to an open model: names to files, saved plans, engines, fleets, vLLM. Shared by cli and windlass.Client."""
