"""Energy and carbon of a run, with the method and the uncertainty of every number."""
