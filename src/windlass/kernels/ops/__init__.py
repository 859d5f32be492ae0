"""Operations, one a file: each chooses between its CPU, Triton and reference implementation."""
