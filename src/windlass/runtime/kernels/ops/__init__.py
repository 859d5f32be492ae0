"""Operations, one per file: each dispatches to its CPU, Triton or reference implementation."""
