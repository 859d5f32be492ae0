"""Memory and disk: aligned buffers, the file that holds weights as kernels read them, reads past the page cache."""
